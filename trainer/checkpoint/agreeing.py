"""The same verdict on every rank about an act that may fail on one of them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as torch_dist

from trainer.checkpoint.errors import CheckpointError, first_cause

Group = torch_dist.ProcessGroup | None
"""A gloo group of all ranks; None in a world of one."""


def on_all(act: Callable[[], None], folder: Path, group: Group) -> None:
    """Do something on every rank; when it fails on one, raise CheckpointError on all."""
    failure: Exception | None = None
    try:
        act()
    except Exception as error:
        failure = error
    if on_any(failure is not None, group):
        raise _as_checkpoint_error(failure, folder) from failure


def on_any(flag: bool, group: Group) -> bool:
    """Whether the flag is set on any rank."""
    if group is None:
        return flag
    value = torch.tensor(int(flag))
    torch_dist.all_reduce(value, op=torch_dist.ReduceOp.MAX, group=group)
    return bool(value)


def sum_on_all(value: int, group: Group) -> int:
    """The sum of the ranks' values."""
    if group is None:
        return value
    total = torch.tensor(value, dtype=torch.int64)
    torch_dist.all_reduce(total, group=group)
    return int(total)


def _as_checkpoint_error(failure: Exception | None, folder: Path) -> CheckpointError:
    if isinstance(failure, CheckpointError):
        return failure
    reason = "another rank failed" if failure is None else first_cause(failure)
    with suppress(OSError):
        free = shutil.disk_usage(folder.parent).free
        reason += f" ({free / 2**20:.0f} MiB free)"
    return CheckpointError(f"cannot write the checkpoint {folder}: {reason}")
