"""The random numbers of one rank, so that a resumed run draws those that the unbroken one would have drawn."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint.integrity import ChecksummedFile, Manifest


def random_state() -> dict[str, Any]:
    """The state of every generator of this process: Python's, NumPy's where it is in use, torch's on CPU and CUDA."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = [name, keys.tolist(), *rest]
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Continue every generator from `random_state()`."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy

        name, keys, *rest = state["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def write_random_state(folder: Path, rank: int, state: dict[str, Any]) -> Manifest:
    """Write the state of one rank, synced to disk; its file's length and checksum."""
    path = _file(folder, rank)
    with path.open("wb") as raw:
        file = ChecksummedFile(raw)
        torch.save(state, file)
        raw.flush()
        os.fsync(raw.fileno())
    return {path.name: file.entry()}


def read_random_state(folder: Path, rank: int) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(_file(folder, rank), weights_only=True)
    return state


def _file(folder: Path, rank: int) -> Path:
    return folder / f"random_{rank}.pt"
