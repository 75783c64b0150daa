"""The same verdict on every rank about an act that may fail on one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as torch_dist
from torch.distributed.checkpoint.api import CheckpointException

from trainer.checkpoint.errors import CheckpointError, first_cause

Group = torch_dist.ProcessGroup | None
"""A gloo group of all ranks; None in a world of one."""
Failure = Callable[[str], CheckpointError]
"""From a reason to the error that tells it."""


def on_all(act: Callable[[], None], group: Group, failure: Failure) -> None:
    """Do something on every rank; when it fails on some, raise the first one's CheckpointError on all."""
    caught: BaseException | None = None
    try:
        act()
    except (Exception, CheckpointException) as error:
        caught = error
    reasons = gather(None if caught is None else _reason(caught, failure), group)
    for rank, reason in enumerate(reasons):
        if reason is not None:
            raise CheckpointError(reason if len(reasons) == 1 else f"rank {rank}: {reason}") from caught


def gather(value: Any, group: Group) -> list[Any]:
    """The ranks' values, in rank order."""
    if group is None:
        return [value]
    values: list[Any] = [None] * torch_dist.get_world_size(group)
    torch_dist.all_gather_object(values, value, group=group)
    return values


def _reason(error: BaseException, failure: Failure) -> str:
    return str(error) if isinstance(error, CheckpointError) else str(failure(first_cause(error)))
