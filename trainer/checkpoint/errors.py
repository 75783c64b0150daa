"""The errors of checkpoints that cannot be written or read, and how all ranks raise the same one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from trainer.dist import Group, gather
from trainer.words import first_line, render_bytes

DAMAGED = "If a file is damaged, move this folder away: the run takes an earlier checkpoint then, or begins anew"


class CheckpointError(Exception):
    """A checkpoint could not be written or read; the message names the folder and what to do."""


class SaverLostError(CheckpointError):
    """A save failed because the saver process ended; the trainer itself can still write."""


def load_error(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"cannot load {path}: {reason}. {DAMAGED}")


def write_error(path: Path, reason: str) -> CheckpointError:
    with suppress(OSError):
        reason += f" ({render_bytes(shutil.disk_usage(path.parent).free)} free)"
    return CheckpointError(f"cannot write the checkpoint {path}: {reason}")


def first_cause(error: BaseException) -> str:
    """The type and first line of an error, or of the first rank's error inside torch's combined one."""
    failures = getattr(error, "failures", {})
    return first_line(next((failure[0] for failure in failures.values()), error))


Failure = Callable[[str], CheckpointError]
"""Makes the error for a reason."""


def on_all(act: Callable[[], None], group: Group, failure: Failure) -> None:
    """Call `act` on every rank. If it fails on some, raise the first one's error as CheckpointError on all."""
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
