"""The start on a GPU: weights through pinned memory, and what the second start takes over from the first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.support.ferry import REPO
from tests.support.limits import HANG_S
from trainer.models.hf import BLOCK, init_random, load_pretrained

ROWS, WIDTH = 3 * (BLOCK // 1024) + 7, 1024


class OneMatrix(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((ROWS, WIDTH), torch.nan, device=device))


def test_random_weights_are_those_of_the_cpu():
    here, there = OneMatrix("cpu"), OneMatrix("cuda")
    init_random(here, 1)
    init_random(there, 1)
    assert torch.equal(there.weight.cpu(), here.weight)


def test_stored_weights_arrive_unchanged(tmp_path):
    stored = torch.randn(ROWS, WIDTH).bfloat16()
    save_file({"weight": stored}, tmp_path / "model.safetensors")
    there = OneMatrix("cuda")
    load_pretrained(there, tmp_path)
    assert torch.equal(there.weight.cpu(), stored.float())


def train_once(folder: Path) -> tuple[str, set[str]]:
    """(the line about the start, the graphs that the cache then holds)."""
    pytest.importorskip("triton")
    env = {**os.environ, "TORCHFERRY_CACHE": str(folder / "cache")}
    env = {name: value for name, value in env.items() if name not in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    words = ("train.steps=3", "train.eval_every=0", "train.save_every=0", "run.export=false", "train.resume=never")
    command = [sys.executable, "train.py", "configs/01_debug_sft.py", *words, "--run-dir", str(folder / "run")]
    done = subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stdout + done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("first step after"))
    return line, {str(path.relative_to(folder)) for path in (folder / "cache").rglob("fxgraph/*/*")}


def test_second_start_takes_its_graphs_from_the_cache(tmp_path):
    first, compiled = train_once(tmp_path)
    second, after = train_once(tmp_path)
    print(f"\n1st: {first}\n2nd: {second}")
    assert compiled
    assert after == compiled
    assert json.loads((tmp_path / "run" / "outcome.json").read_text())["start_s"]["first step"] > 0
