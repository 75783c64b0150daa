"""What is told when a checkpoint cannot be written or read."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from trainer.words import first_line, render_bytes

DAMAGED = "If a file is damaged, remove this folder: an earlier checkpoint is taken then"


class CheckpointError(Exception):
    """A checkpoint could not be written or read; the message names the folder and what to do."""


class SaverLostError(CheckpointError):
    """A save ended with the process that wrote it; the trainer itself can write."""


def cannot_load(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"cannot load {path}: {reason}. {DAMAGED}")


def cannot_write(path: Path, reason: str) -> CheckpointError:
    with suppress(OSError):
        reason += f" ({render_bytes(shutil.disk_usage(path.parent).free)} free)"
    return CheckpointError(f"cannot write the checkpoint {path}: {reason}")


def first_cause(error: BaseException) -> str:
    """The kind and first line of an error, or of the first rank's error that torch has wrapped into one."""
    failures = getattr(error, "failures", {})
    return first_line(next((failure[0] for failure in failures.values()), error))
