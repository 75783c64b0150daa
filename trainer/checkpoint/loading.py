"""From a checkpoint back into a model, an optimizer and the random numbers."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.checkpoint.errors import DAMAGED, CheckpointError, reading
from trainer.checkpoint.folders import STATE_FILE, is_complete
from trainer.checkpoint.integrity import Manifest
from trainer.checkpoint.random_state import read_random_state, set_random_state
from trainer.checkpoint.shards import State, read_all_shards, read_model_shards, read_shards
from trainer.dist import Dist
from trainer.parallel.tensors import local_tensor
from trainer.schema import CHECKPOINT_MARKER


@dataclass(frozen=True)
class Resumed:
    """What a loaded checkpoint says beside weights and optimizer."""

    step: int
    world_size: int
    extra: dict[str, Any]
    files: Manifest = field(default_factory=dict)
    """Length and checksum of each file; empty for one written by an earlier version."""


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, dist: Dist) -> Resumed:
    """Fill model, optimizer and random state in place from a complete checkpoint, and return the rest.

    Any world size may load. The random state is restored only where the world size is the one that saved: at another
    there is no state to continue. The optimizer keeps its own settings (weight decay, betas, eps).
    """
    resumed = read_info(path)
    read_shards(path, model, optimizer, dist.control_group)
    _check_finite(model, path)
    if resumed.world_size == dist.world_size:
        with reading(path):
            set_random_state(read_random_state(path, dist.rank))
    return resumed


def load_model(path: Path, model: nn.Module, dist: Dist) -> Resumed:
    """Fill only the model in place from a complete checkpoint of any world size, and return what else it says.

    Frozen parameters are not in a checkpoint and stay as they are. One process needs no process group.
    """
    resumed = read_info(path)
    read_model_shards(path, model, dist.control_group)
    _check_finite(model, path)
    return resumed


def read_full(path: Path) -> State:
    """The whole state of a checkpoint on the CPU, in one process without any process group.

    {"model": {name: tensor}, "optimizer": {name: {"exp_avg": tensor, "exp_avg_sq": tensor, "step": tensor}}}.
    """
    read_info(path)
    return read_all_shards(path)


def read_info(path: Path) -> Resumed:
    """What a checkpoint says beside weights and optimizer, to be judged before they are loaded."""
    if not is_complete(path):
        raise CheckpointError(f"{path} is not a complete checkpoint: it has no {CHECKPOINT_MARKER} file")
    with reading(path):
        info = json.loads((path / STATE_FILE).read_text())
        info.pop("format", None)
        return Resumed(info.pop("step"), info.pop("world_size"), info, info.pop("files", {}))


def _check_finite(model: nn.Module, path: Path) -> None:
    bad = [name for name, parameter in model.named_parameters() if not local_tensor(parameter).isfinite().all()]
    if bad:
        raise CheckpointError(f"{', '.join(bad[:3])}: values that are not finite; cannot load {path}. {DAMAGED}")
