"""The plan for memory on a GPU: told, tried before the first step, and changed where it does not fit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.failing import compile_failure, fail_once
from tests.support.ferry import REPO
from tests.support.limits import HANG_S
from tests.support.tiny import packed_batch
from trainer.batch import Batch
from trainer.config.load import config_from_dict
from trainer.data.loader import Data
from trainer.dist import Dist, stop_dist
from trainer.kernels import support
from trainer.memory.activations import Kernels
from trainer.memory.estimate import estimate_memory
from trainer.memory.fitting import MemoryKeeper, free_bytes, planned
from trainer.memory.plans import MemoryPlan
from trainer.metrics.log import MetricsLog
from trainer.models.attention import fastest_kernels
from trainer.models.build import build_model, fill_weights
from trainer.models.families.decoder_shape import DecoderShape
from trainer.models.losses import sft_loss
from trainer.optim.build import build_optimizer
from trainer.parallel.choose import make_backend
from trainer.schema import MEMORY_PLAN_FILE, Config
from trainer.train import probe
from trainer.train.run import Run
from trainer.train.step import train_step

SHAPE = DecoderShape("qwen2", 32000, 1024, 4096, 8, 16, 4, 64)
LENGTH, ROWS = 2048, 16
DEVICE = torch.device("cuda", 0)
TRAIN = str(REPO / "train.py")


def sized(backend: str) -> Config:
    return config_from_dict(
        {
            "target": {"train_backend": backend},
            "data": {"seq_len": LENGTH},
            "optim": {"learning_rate": 1e-3},
            "train": {"micro_batch_size": ROWS, "precision": "bf16"},
            "parallel": {"cpu_offload": False},
        }
    )


class SameBatch:
    def step_batches(self, _step: int) -> list[Batch]:
        return [packed_batch([[1024, 1024]] * ROWS, length=LENGTH, vocab_size=SHAPE.vocab_size)]


def run_of(config: Config, folder: Path) -> tuple[Run, MemoryKeeper]:
    torch._dynamo.reset()
    dist = Dist(0, 0, 1, DEVICE)
    memory = MemoryKeeper(config, SHAPE, folder, dist)
    backend = make_backend(memory.config, dist)
    module = backend.prepare(build_model(memory.config, SHAPE))
    fill_weights(config, module, None)
    run = Run(
        config=memory.config,
        run_dir=folder,
        dist=dist,
        backend=backend,
        module=module,
        optimizer=build_optimizer(module, config.optim),
        data=Data(SameBatch(), None, None),
        loss_fn=sft_loss,
        log=MetricsLog(folder / "metrics.jsonl", total_steps=9, enabled=True),
    )
    return run, memory


@pytest.fixture(autouse=True)
def clean_device():
    yield
    stop_dist()
    support._given_up.clear()
    torch._dynamo.reset()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("backend", ["pytorch", "fsdp"])
def test_plan_that_does_not_fit_gives_way_to_one_that_does(backend, tmp_path, capsys):
    run, memory = run_of(sized(backend), tmp_path)
    assert memory.fit.choice is not None
    fastest = memory.fit.choice.chosen.plan
    assert fastest.activation_checkpointing == "none"
    half = planned(sized(backend), MemoryPlan("budget", 0.5, False, False))
    needs = estimate_memory(SHAPE, half, world_size=1, kernels=Kernels.on(DEVICE, half.parallel)).total
    room = int(1.1 * needs) - torch.cuda.memory_allocated(DEVICE)
    held = torch.empty(free_bytes(DEVICE) - room, dtype=torch.uint8, device=DEVICE)
    with fastest_kernels():
        probe.probe(run, memory)
        values = train_step(run, 0, lr=1e-3).read()
    del held
    told = capsys.readouterr().out
    print(told)
    assert run.config.parallel.activation_checkpointing == "budget"
    assert "probe: peak" in told
    assert values[4] == 1.0
    assert json.loads((tmp_path / MEMORY_PLAN_FILE).read_text())["failed"][0] == fastest.render()


def test_failing_compiler_leaves_a_run_in_plain_torch_with_the_same_loss(tmp_path, capsys):
    run, memory = run_of(sized("pytorch"), tmp_path)
    with fastest_kernels():
        compiled = train_step(run, 0, lr=0.0).read()
        fail_once(run, compile_failure(), backward=False)
        probe.probe(run, memory)
        plain = train_step(run, 0, lr=0.0).read()
    assert "warning: blocks cannot be compiled and run as plain torch, which is" in capsys.readouterr().out
    assert not run.backend.compiled
    assert plain[0] == pytest.approx(compiled[0], rel=2e-3)


def test_run_tells_its_plan_and_what_the_probe_found(tmp_path):
    words = ["train.steps=2", "run.export=false", "data.eval_fraction=0.0", "data.max_train_rows=64"]
    out = subprocess.run(
        [sys.executable, TRAIN, _config(tmp_path), "--run-dir", str(tmp_path / "run"), *words],
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert out.returncode == 0, out.stdout + out.stderr
    print(*(line for line in out.stdout.splitlines() if line.startswith(("memory:", "probe:", "first step"))), sep="\n")
    assert "memory: activation_checkpointing=none: about " in out.stdout
    assert "probe: peak " in out.stdout


def test_calibration_finds_a_size_within_two_minutes(tmp_path):
    out = subprocess.run(
        [sys.executable, TRAIN, _config(tmp_path), "--calibrate", "--json"],
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert out.returncode == 0, out.stdout + out.stderr
    print(out.stderr)
    found = json.loads(out.stdout)
    assert all(one["peak_gib"] > 0 for one in found["timed"])
    assert found["overrides"][0] == f"train.micro_batch_size={found['best_rows']}"


def _config(folder: Path) -> str:
    file = folder / "config.py"
    file.write_text(
        "from trainer.schema import Config, DataConfig, ModelConfig\n"
        "config = Config(data=DataConfig(seq_len=1024), model=ModelConfig(hidden_size=512, intermediate_size=2048, "
        "num_heads=8, num_kv_heads=4, num_layers=6))\n"
    )
    return str(file)
