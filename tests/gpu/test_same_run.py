"""The same 50 steps on one GPU, on two with DDP and on two with FSDP: the same losses, and the same model exported."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.ferry import REPO
from tests.support.limits import HANG_S

pytestmark = pytest.mark.gpus(2)
CONFIG = str(REPO / "configs" / "02_debug_sft_fsdp.py")
SIZE = ("model.hidden_size=512", "model.intermediate_size=1536", "model.num_layers=8", "model.num_heads=8")
RUN = ("train.steps=50", "train.global_batch_size=16", "train.micro_batch_size=4", "optim.learning_rate=5e-4")
QUIET = ("train.eval_every=0", "train.save_every=0", "train.deterministic=true")
BACKENDS = {
    "one": ("target.gpu_ranks=[0]", "target.train_backend=pytorch"),
    "ddp": ("target.gpu_ranks=[0,1]", "target.train_backend=ddp"),
    "fsdp": ("target.gpu_ranks=[0,1]", "target.train_backend=fsdp"),
    "one in fp32": ("target.gpu_ranks=[0]", "target.train_backend=pytorch", "train.precision=fp32"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    folders = {name: tmp_path_factory.mktemp(name.replace(" ", "_")) for name in BACKENDS}
    for name, folder in folders.items():
        words = (*SIZE, *RUN, *QUIET, *BACKENDS[name], "--run-dir", str(folder))
        done = subprocess.run(
            [sys.executable, str(REPO / "train.py"), CONFIG, *words], capture_output=True, timeout=HANG_S
        )
        assert done.returncode == 0, (done.stdout + done.stderr).decode()[-4000:]
    return folders


def losses(run_dir: Path) -> torch.Tensor:
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return torch.tensor([row["loss"] for row in rows if "loss" in row], dtype=torch.float64)


def weights(run_dir: Path) -> torch.Tensor:
    tensors = load_file(run_dir / "export" / "model.safetensors")
    return torch.cat([tensors[name].flatten().double() for name in sorted(tensors)])


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def test_losses_of_fifty_steps_are_the_same_on_one_gpu_with_ddp_and_with_fsdp(runs):
    one = losses(runs["one"])
    off = {name: (losses(runs[name]) - one).abs().max().item() for name in runs if name != "one"}
    print(f"\nlargest difference of 50 losses ({one[0]:.3f} to {one[-1]:.3f}) from one GPU in bf16: {off}")
    assert len(one) == 50
    assert off["ddp"] < 1e-2
    assert off["fsdp"] < 1e-2


def test_exports_differ_by_no_more_than_twice_what_bf16_itself_changes(runs):
    one = weights(runs["one"])
    off = {name: distance(weights(runs[name]), one) for name in runs if name != "one"}
    print(f"\nrelative distance of the exported weights from one GPU in bf16: {off}")
    assert off["ddp"] <= 2 * off["one in fp32"]
    assert off["fsdp"] <= 2 * off["one in fp32"]
