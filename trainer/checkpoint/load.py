"""From a checkpoint back into a model, an optimizer and the random numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.checkpoint.errors import DAMAGED, CheckpointError, first_cause, load_error, on_all
from trainer.checkpoint.folders import (
    STATE_FILE,
    DamagedError,
    Manifest,
    damages,
    disagreements,
    is_complete,
    missing,
    read_state,
    share,
)
from trainer.checkpoint.shards import (
    model_state,
    read_all_shards,
    read_model_shards,
    read_shards,
    sharded_state,
)
from trainer.checkpoint.states import State, check_finite, read_random_state, set_random_state
from trainer.dist import Dist

_ALONE = Dist(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"))


@dataclass(frozen=True)
class Resumed:
    """What a loaded checkpoint says beside weights and optimizer."""

    step: int
    world_size: int
    extra: dict[str, Any]
    files: Manifest = field(default_factory=dict)
    """Length and checksum of each file; empty for one written by an earlier version."""
    has_verified_state: bool = True
    """Whether what it says is known to be what was written; not for one written by an earlier version."""


def load(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, dist: Dist, *, verified: Resumed | None = None
) -> Resumed:
    """Fill model, optimizer and random state in place from a complete checkpoint, and return the rest.

    Any world size may load. The random state is restored only where the world size is the one that saved: at another
    there is no state to continue. The optimizer keeps its own settings (weight decay, betas, eps). When any rank finds
    a file missing, cut or changed, all raise CheckpointError; model and optimizer are then undefined, the random state
    is as it was. `verified`: what `verify` has returned for it just before.
    """
    group, verdict = dist.control_group, f"cannot load {path}. {DAMAGED}"
    resumed = verified or verify(path, dist)
    failure = partial(load_error, path)
    random: list[dict[str, Any]] = []
    on_all(lambda: read_shards(path, model, optimizer, group), group, failure)
    on_all(lambda: check_finite(sharded_state(model, optimizer), verdict), group, failure)
    if resumed.world_size == dist.world_size:
        on_all(lambda: random.append(read_random_state(path, dist.rank)), group, failure)
        set_random_state(random[0])
    return resumed


def load_model(path: Path, model: nn.Module, dist: Dist, *, verified: Resumed | None = None) -> Resumed:
    """Fill only the model in place from a complete checkpoint of any world size, and return what else it says.

    Frozen parameters are not in a checkpoint and stay as they are. One process needs no process group. `verified`: see
    `load`.
    """
    group, verdict = dist.control_group, f"cannot load {path}. {DAMAGED}"
    resumed = verified or verify(path, dist)
    on_all(lambda: read_model_shards(path, model, group), group, partial(load_error, path))
    on_all(lambda: check_finite({"model": model_state(model)}, verdict), group, partial(load_error, path))
    return resumed


def read_full(path: Path) -> State:
    """The whole state of a checkpoint on the CPU, in one process without any process group.

    {"model": {name: tensor}, "optimizer": {name: {"exp_avg": tensor, "exp_avg_sq": tensor, "step": tensor}}}.
    """
    found: list[State] = []
    verify(path, _ALONE)
    on_all(lambda: found.append(read_all_shards(path)), None, partial(load_error, path))
    return found[0]


def read_info(path: Path) -> Resumed:
    """What a checkpoint says beside weights and optimizer, to be judged before they are loaded.

    Raises CheckpointError where that is not what was written, or contradicts the folder.
    """
    if not is_complete(path):
        raise CheckpointError(f"{path} is not a complete checkpoint: {missing(path)}")
    try:
        info, has_verified_state = read_state(path)
        wrong = disagreements(path, info)
        if wrong:
            raise DamagedError("; ".join(wrong))
        info.pop("format", None)
        return Resumed(info.pop("step"), info.pop("world_size"), info, info.pop("files", {}), has_verified_state)
    except DamagedError as error:
        raise load_error(path, str(error)) from error
    except OSError as error:
        raise load_error(path, f"{STATE_FILE}: {first_cause(error)}") from error


def verify(path: Path, dist: Dist) -> Resumed:
    """What a checkpoint says, after the ranks together have compared every file with what was written.

    Raises CheckpointError on all ranks when one of them cannot read it or finds a difference.
    """
    read: list[Resumed] = []

    def look() -> None:
        read.append(read_info(path))
        damaged = damages(path, share(read[0].files, dist.rank, dist.world_size))
        if damaged:
            raise load_error(path, "; ".join(damaged))

    on_all(look, dist.control_group, partial(load_error, path))
    return read[0]
