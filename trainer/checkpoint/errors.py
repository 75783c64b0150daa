"""What is told when a checkpoint cannot be written or read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DAMAGED = "If a file is damaged, remove this folder: an earlier checkpoint is taken then"


class CheckpointError(Exception):
    """A checkpoint could not be written or read; the message names the folder and what to do."""


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Whatever goes wrong with a file of a checkpoint is an error about that checkpoint."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise cannot_load(path, f"{type(error).__name__}: {first_cause(error)}") from error


def cannot_load(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"cannot load {path}: {reason}. {DAMAGED}")


def first_cause(error: BaseException) -> str:
    """The first line of an error, or of the first rank's error that torch has wrapped into one."""
    failures = getattr(error, "failures", {})
    cause = next((failure[0] for failure in failures.values()), error)
    return next(iter(str(cause).splitlines()), type(cause).__name__)
