"""The same verdict on every rank about an act that may fail on one of them."""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed.checkpoint.api import CheckpointException

from trainer.checkpoint.errors import CheckpointError, first_cause
from trainer.dist import Group, gather

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


def _reason(error: BaseException, failure: Failure) -> str:
    return str(error) if isinstance(error, CheckpointError) else str(failure(first_cause(error)))
