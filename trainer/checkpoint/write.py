"""Writes a checkpoint from all ranks together: either complete, or not at all.

If the ranks see several storages, `write_parts` writes a part into each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as torch_dist

from trainer.checkpoint.errors import CheckpointError, first_cause, on_all, write_error
from trainer.checkpoint.folders import FORMAT, Manifest, aside_name, commit, make_empty, step_name
from trainer.checkpoint.retention import Keep, prune
from trainer.checkpoint.shards import write_shards
from trainer.checkpoint.states import State, check_finite, local_bytes, write_random_state
from trainer.dist import Group, gather
from trainer.files import lack_of_room, remove_tree
from trainer.nodes import Storages

HEADROOM_BYTES = 8 * 2**20  # metadata, random states and the file system's own blocks

StageHook = Callable[[str], None]
"""Called with the name of each stage of a save, in the thread that runs it."""


def ignore_stage(stage: str) -> None:
    """The default callback: does nothing."""


@dataclass(frozen=True)
class Order:
    """What to write, and where. `info` is plain JSON, the same on all ranks."""

    folder: Path
    step: int
    rank: int
    world_size: int
    random: dict[str, Any]
    info: dict[str, Any]
    keep: Keep
    storages: Storages | None = None
    """The separate storages of `folder`; None if all ranks see the same one."""

    @property
    def is_keeper(self) -> bool:
        """See `Dist.is_keeper`."""
        return self.rank == (0 if self.storages is None else self.storages.keeper(self.rank))

    @property
    def final(self) -> Path:
        return self.folder / step_name(self.step)

    @property
    def aside(self) -> Path:
        return self.folder / aside_name(self.step)


def write(order: Order, state: State, group: Group, on_stage: StageHook = ignore_stage) -> str:
    """Write `folder/step_NNNNNN`. Every rank must call this with its part of the state.

    Returns a note, on rank 0, if older checkpoints could not be deleted; this one is complete nevertheless.

    Raises CheckpointError on every rank if any rank cannot write or has a value that is not finite. Existing
    checkpoints are then unchanged, and the partial folder is removed.
    """
    on_all(lambda: check_finite(state, f"{order.final} not written"), group, partial(write_error, order.final))
    _check_space(order, state, group)
    try:
        _write_aside(order, state, group, on_stage)
    except CheckpointError:
        if group is not None:
            torch_dist.barrier(group=group)  # no rank may still write when the keeper removes the folder
        if order.is_keeper:
            remove_tree(order.aside)
        raise
    on_stage("committed")
    note = _prune(order) if order.is_keeper else ""
    on_stage("pruned")
    return note


def _prune(order: Order) -> str:
    try:
        prune(order.folder, order.keep, newest=order.step)
    except OSError as error:
        return f"older checkpoints in {order.folder} were not deleted: {first_cause(error)}"
    return ""


def _write_aside(order: Order, state: State, group: Group, on_stage: StageHook) -> None:
    if order.storages is not None:
        from trainer.checkpoint.write_parts import write_parts  # only then are torch's planners needed

        write_parts(order, order.storages, state, group, on_stage)
        return
    aside, main = order.aside, order.rank == 0
    failure, files = partial(write_error, order.final), Manifest()
    on_all(lambda: make_empty(aside) if main else None, group, failure)
    on_stage("begun")
    on_all(lambda: files.update(write_shards(state, aside, group)), group, failure)
    on_stage("shards")
    on_all(lambda: files.update(write_random_state(aside, order.rank, order.random)), group, failure)
    on_stage("random")
    info = {
        "format": FORMAT,
        "step": order.step,
        "world_size": order.world_size,
        **order.info,
        # each rank reports its own files: on a network file system they may appear late on other ranks
        "files": {name: entry for part in gather(files, group) for name, entry in part.items()},
    }
    on_all(lambda: commit(aside, order.final, info, on_stage) if main else None, group, failure)


def _check_space(order: Order, state: State, group: Group) -> None:
    """Raise on every rank, before anything is written, if the disk has no room for all ranks' shards."""
    sizes, storages = gather(local_bytes(state), group), order.storages
    if storages is not None:
        sizes = [sizes[rank] for rank in storages.ranks(storages.of_rank[order.rank])]
    needed, folder = sum(sizes) + HEADROOM_BYTES, order.folder

    def check() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        lack = lack_of_room(folder, needed)
        if lack:
            hint = "Free some space, or lower train.keep_last"
            raise CheckpointError(f"no room for a checkpoint in {folder}: {lack}. {hint}")

    on_all(check if order.is_keeper else lambda: None, group, partial(write_error, order.final))
