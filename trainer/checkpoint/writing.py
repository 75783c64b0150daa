"""A checkpoint is written by all ranks together: complete, or not at all."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import nn

from trainer.checkpoint.agreeing import Group, on_all, sum_on_all
from trainer.checkpoint.errors import CheckpointError
from trainer.checkpoint.folders import commit, make_empty, step_name
from trainer.checkpoint.random_state import random_state, write_random_state
from trainer.checkpoint.shards import sharded_state, write_shards
from trainer.dist import Dist
from trainer.parallel.tensors import local_tensor

HEADROOM_BYTES = 8 * 2**20  # metadata, random states and the file system's own blocks


def save(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, extra: dict, dist: Dist) -> Path:
    """Write `folder/step_NNNNNN` and return it; every rank calls this at the same step border.

    `extra` is plain JSON, the same on all ranks (data position, config). Raises CheckpointError on every rank when any
    rank could not write or holds a weight that is not finite; what was there before is then as it was, and the partial
    folder is gone.
    """
    aside, final = folder / f".tmp_{step_name(step)}", folder / step_name(step)
    group = dist.control_group
    state = sharded_state(model, optimizer)
    info = {"step": step, "world_size": dist.world_size, **extra}
    on_all(lambda: check_finite(model, f"{final} not written"), final, group)
    _check_space(folder, state, group, dist.rank)
    try:
        on_all(lambda: make_empty(aside) if dist.is_main else None, aside, group)
        on_all(lambda: write_shards(state, aside, group), aside, group)
        on_all(lambda: write_random_state(aside, dist.rank, random_state()), aside, group)
        on_all(lambda: commit(aside, final, info) if dist.is_main else None, aside, group)
    except CheckpointError:
        if group is not None:
            torch_dist.barrier(group=group)  # no rank may still write into the folder that rank 0 removes
        if dist.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
        raise
    return final


def check_finite(model: nn.Module, what: str) -> None:
    bad = [name for name, parameter in model.named_parameters() if not local_tensor(parameter).isfinite().all()]
    if bad:
        raise CheckpointError(f"{', '.join(bad[:3])}: values that are not finite; {what}")


def _check_space(folder: Path, state: dict[str, Any], group: Group, rank: int) -> None:
    """Raise on every rank, before anything is written, when the disk has no room for all ranks' shards."""
    needed = sum_on_all(_local_bytes(state), group) + HEADROOM_BYTES

    def check() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if free < needed:
            raise CheckpointError(_no_space(folder, needed, free))

    on_all(check if rank == 0 else lambda: None, folder, group)


def _local_bytes(state: Any) -> int:
    """Bytes of all tensors in nested dicts and lists that this rank holds."""
    if isinstance(state, torch.Tensor):
        local = local_tensor(state)
        return local.numel() * local.element_size()
    children = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    return sum(_local_bytes(child) for child in children)


def _no_space(folder: Path, needed: int, free: int) -> str:
    return (
        f"no room for a checkpoint in {folder}: it needs {needed / 2**20:.1f} MiB and {free / 2**20:.1f} MiB are free. "
        f"Free some space, or lower train.keep_last"
    )
