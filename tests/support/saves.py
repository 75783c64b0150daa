"""A small model with an optimizer, saves of it that are waited for, and a gate that holds a save at a point."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.support.limits import HANG_S
from trainer.checkpoint.folders import render_marker
from trainer.checkpoint.retention import Keep
from trainer.dist import Dist
from trainer.optim.build import build_optimizer
from trainer.saver.writer import Writer
from trainer.schema import OptimConfig


class Tied(nn.Module):
    """Weights of several sizes, one with a single row, and one tensor under two names."""

    def __init__(self, vocab: int = 7) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(vocab, 4)
        self.mid = nn.Linear(4, 1)
        self.head = nn.Linear(4, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.mid(self.embed(ids)) * self.embed(ids))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.arange(7)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def start(dist: Dist) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Tied()
    if dist.world_size > 1:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    return model, build_optimizer(model, OptimConfig(learning_rate=0.1))


def save(
    folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, extra: dict, dist: Dist, **options
) -> Path:
    """A save that is waited for."""
    writer = Writer(dist, beside=None, on_stage=options.pop("on_stage", lambda point: None))
    writer.start(folder, step, model, optimizer, extra, keep=Keep())
    written = writer.result()
    writer.close()
    return written.path


def change_state(checkpoint: Path, **changes: Any) -> None:
    """Give its state.json other values, as a save would have written them."""
    state = json.dumps({**json.loads((checkpoint / "state.json").read_text()), **changes}).encode()
    (checkpoint / "state.json").write_bytes(state)
    (checkpoint / "COMPLETE").write_bytes(render_marker(state))


def as_of_format_2(checkpoint: Path) -> None:
    """Make of it what a save wrote before the marker said anything."""
    change_state(checkpoint, format=2)
    (checkpoint / "COMPLETE").write_bytes(b"")


class Gate:
    """Holds a save at one of its points until it is opened."""

    def __init__(self, point: str) -> None:
        self._point = point
        self._open = threading.Event()
        self.passed: list[str] = []

    def __call__(self, point: str) -> None:
        if point == self._point:
            assert self._open.wait(HANG_S)
        self.passed.append(point)

    def open(self) -> None:
        self._open.set()


def begin(writer: Writer, folder: Path | str, at: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    writer.start(Path(folder), at, model, optimizer, {}, keep=Keep())
