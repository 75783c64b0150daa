"""The trainer on CUDA and NCCL against itself on the CPU: backends, precision, resume."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.ferry import REPO
from tests.support.limits import HANG_S

CONFIG = str(REPO / "configs" / "02_debug_sft_fsdp.py")
SHORT = ("train.steps=8", "optim.warmup_steps=2", "train.eval_every=0", "train.save_every=4", "run.export=false")
BATCH = ("train.global_batch_size=8", "train.micro_batch_size=2", "data.max_train_rows=400")
Train = Callable[..., list[float]]


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Losses of the eight steps of a run; the same words are run once."""
    known: dict[tuple[str, ...], list[float]] = {}

    def run(*words: str, run_dir: Path | None = None) -> list[float]:
        if words not in known or run_dir:
            folder = run_dir or tmp_path_factory.mktemp("run")
            command = [sys.executable, str(REPO / "train.py"), CONFIG, *SHORT, *BATCH, *words, "--run-dir", str(folder)]
            done = subprocess.run(command, capture_output=True, timeout=HANG_S)
            assert done.returncode == 0, (done.stdout + done.stderr).decode()[-4000:]
            rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
            known[words] = [row["loss"] for row in rows if "loss" in row]
        return known[words]

    return run


ONE = ("target.gpu_ranks=[0]", "target.train_backend=pytorch")
FSDP = ("target.gpu_ranks=[0,1]", "target.train_backend=fsdp")
DDP = ("target.gpu_ranks=[1,0]", "target.train_backend=ddp")
FP32 = "train.precision=fp32"


def worst(a: list[float], b: list[float]) -> float:
    assert len(a) == len(b) == 8
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


@pytest.mark.gpus(2)
@pytest.mark.parametrize("backend", [FSDP, DDP], ids=["fsdp", "ddp"])
def test_two_gpus_reproduce_the_losses_of_one_in_fp32(train, backend):
    assert worst(train(*ONE, FP32), train(*backend, FP32)) < 1e-4


def test_one_gpu_reproduces_the_losses_of_the_cpu_in_fp32(train):
    assert worst(train(*ONE, FP32), train(*ONE, FP32, "target.device=cpu")) < 1e-3


@pytest.mark.gpus(2)
@pytest.mark.parametrize("backend", [FSDP, DDP], ids=["fsdp", "ddp"])
def test_bf16_backends_agree_within_twice_the_error_of_bf16_itself(train, backend):
    error = worst(train(*ONE, FP32), train(*ONE))
    assert worst(train(*ONE), train(*backend)) <= 2 * error


@pytest.mark.gpus(2)
@pytest.mark.parametrize(
    "options",
    [
        ("parallel.sharding_strategy=HYBRID_SHARD", "parallel.dp_replicate=2"),
        (
            "parallel.sharding_strategy=SHARD_GRAD_OP",
            "parallel.forward_prefetch=2",
            "parallel.backward_prefetch_depth=2",
        ),
        ("parallel.ignored_modules=['*.q_norm','model.norm']", "parallel.cpu_offload=true"),
        ("parallel.activation_checkpointing=selective", "parallel.checkpoint_every=2"),
        ("parallel.wrap_policy=size", "parallel.min_num_params=50000"),
    ],
    ids=["hybrid", "prefetch", "ignored-offload", "selective", "size"],
)
def test_options_of_fsdp_change_no_loss_over_nccl(train, options):
    assert worst(train(*ONE, FP32), train(*FSDP, FP32, *options)) < 1e-4


@pytest.mark.gpus(2)
def test_adapters_over_a_bf16_base_agree_on_one_gpu_and_two_within_the_error_of_bf16(train):
    lora = ("lora.rank=8", "optim.learning_rate=1e-2")
    error = worst(train(*ONE, *lora, FP32), train(*ONE, *lora))
    assert worst(train(*ONE, *lora), train(*FSDP, *lora)) <= 2 * error


@pytest.mark.gpus(2)
def test_hang_inside_nccl_is_told_with_the_late_rank(tmp_path):
    words = (*SHORT, *BATCH, *FSDP, "train.steps=100000", "train.hang_timeout_s=8", "--run-dir", str(tmp_path))
    command = [sys.executable, str(REPO / "train.py"), CONFIG, *words]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in started.stdout:
        if line.startswith("step 20/"):
            break
    ranks = [pid for pid in children(started.pid) if environment(pid).get("RANK") == "1"]
    os.kill(ranks[0], signal.SIGSTOP)
    threading.Timer(14, os.kill, (ranks[0], signal.SIGCONT)).start()
    began = time.monotonic()
    _, errors = started.communicate(timeout=HANG_S)
    seconds = time.monotonic() - began
    print(f"\nended {seconds:.0f} s after rank 1 was halted, exit {started.returncode}:\n{errors[-1500:]}")
    assert started.returncode != 0
    assert "rank 1 is late" in errors


def children(pid: int) -> list[int]:
    """The processes below one, however deep."""
    found = [int(word) for path in Path(f"/proc/{pid}/task").glob("*/children") for word in path.read_text().split()]
    return found + [deeper for child in found for deeper in children(child)]


def environment(pid: int) -> dict[str, str]:
    pairs = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


@pytest.mark.gpus(2)
def test_activation_checkpointing_changes_no_loss(train):
    assert worst(train(*FSDP, FP32), train(*FSDP, FP32, "parallel.activation_checkpointing=full")) < 1e-5


@pytest.mark.gpus(2)
def test_resume_on_two_gpus_goes_on_with_the_unbroken_runs_losses(train, tmp_path):
    whole = train(*FSDP, FP32, "train.deterministic=true")
    train(*FSDP, FP32, "train.deterministic=true", "train.stop_after_steps=4", run_dir=tmp_path)
    assert worst(whole, train(*FSDP, FP32, "train.deterministic=true", run_dir=tmp_path)) == 0.0


def test_step_times_are_the_devices_own_and_add_up(tmp_path):
    command = [sys.executable, str(REPO / "train.py"), CONFIG, *SHORT, *BATCH, *ONE, "--run-dir", str(tmp_path)]
    subprocess.run([*command, "train.steps=60"], check=True, capture_output=True, timeout=HANG_S)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    times = sorted(row["step_s"] for row in rows if row.get("step", 0) > 5 and "loss" in row)
    assert times[0] > 0.3 * times[len(times) // 2]  # no step, the last one included, in a fraction of the usual time
