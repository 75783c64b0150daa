"""Loads a checkpoint into a model, an optimizer and the random states."""

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
from trainer.checkpoint.reach import BRING, check_reach, render_lacking
from trainer.checkpoint.shards import (
    model_state,
    read_all_shards,
    read_model_shards,
    read_shards,
    sharded_state,
)
from trainer.checkpoint.spread import Spread
from trainer.checkpoint.states import State, check_finite, read_random_state, set_random_state
from trainer.dist import Dist
from trainer.typed import from_json

_ALONE = Dist(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"))


@dataclass(frozen=True)
class Resumed:
    """A loaded checkpoint's content other than weights and optimizer."""

    step: int
    world_size: int
    extra: dict[str, Any]
    files: Manifest = field(default_factory=dict)
    """Length and checksum of each file; empty if an earlier version wrote the checkpoint."""
    has_verified_state: bool = True
    """Whether the checksum of this content was verified; False if an earlier version wrote the checkpoint."""
    spread: Spread | None = None
    """All parts of the checkpoint, if it was written into several storages."""


def load(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, dist: Dist, *, verified: Resumed | None = None
) -> Resumed:
    """Fill model, optimizer and random state in place from a complete checkpoint, and return the rest.

    Any world size may load. The random state is restored only if the world size is the same as at the save: otherwise
    there is no state to continue. The optimizer keeps its own settings (weight decay, betas, eps). If any rank finds
    a file missing, truncated or changed, all raise CheckpointError; model and optimizer are then undefined, the random
    state is unchanged. `verified`: the result of `verify` for this checkpoint just before.
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
    """Fill only the model in place from a complete checkpoint of any world size, and return the other content.

    Frozen parameters are not in a checkpoint and stay unchanged. One process needs no process group. `verified`: see
    `load`.
    """
    group, verdict = dist.control_group, f"cannot load {path}. {DAMAGED}"
    resumed = verified or verify(path, dist)
    check_reach(path, resumed.spread, lambda: {"model": model_state(model)}, dist)
    on_all(lambda: read_model_shards(path, model, group), group, partial(load_error, path))
    on_all(lambda: check_finite({"model": model_state(model)}, verdict), group, partial(load_error, path))
    return resumed


def read_full(path: Path) -> State:
    """The full state of a checkpoint on the CPU, in one process without a process group.

    {"model": {name: tensor}, "optimizer": {name: {"exp_avg": tensor, "exp_avg_sq": tensor, "step": tensor}}}.
    """
    found: list[State] = []
    spread = verify(path, _ALONE).spread
    lacking = [name for name in spread.needs if not (path / name).exists()] if spread else []
    if spread and lacking:
        raise CheckpointError(f"{path} is not whole: {render_lacking([lacking], ['this node'], spread)}; {BRING}")
    on_all(lambda: found.append(read_all_shards(path)), None, partial(load_error, path))
    return found[0]


def read_info(path: Path) -> Resumed:
    """A checkpoint's content other than weights and optimizer, to check it before these are loaded.

    Raises CheckpointError if it differs from what was written, or contradicts the folder.
    """
    if not is_complete(path):
        raise CheckpointError(f"{path} is not a complete checkpoint: {missing(path)}")
    try:
        info, has_verified_state = read_state(path)
        wrong = disagreements(path, info)
        if wrong:
            raise DamagedError("; ".join(wrong))
        info.pop("format", None)
        files, spread = info.pop("files", {}), info.pop("spread", None)
        parts = from_json(spread, Spread) if spread else None
        if parts is not None:  # files of other parts may be here too
            files |= {name: list(entry) for name, entry in parts.entries.items() if (path / name).exists()}
        return Resumed(info.pop("step"), info.pop("world_size"), info, files, has_verified_state, parts)
    except DamagedError as error:
        raise load_error(path, str(error)) from error
    except OSError as error:
        raise load_error(path, f"{STATE_FILE}: {first_cause(error)}") from error


def verify(path: Path, dist: Dist) -> Resumed:
    """The result of `read_info`, after the ranks together have compared every file with its checksum.

    Raises CheckpointError on all ranks if one of them cannot read the checkpoint or finds a difference.
    """
    read: list[Resumed] = []

    def look() -> None:
        read.append(read_info(path))
        damaged = damages(path, share(read[0].files, *dist.place))
        if damaged:
            raise load_error(path, "; ".join(damaged))

    on_all(look, dist.control_group, partial(load_error, path))
    return read[0]
