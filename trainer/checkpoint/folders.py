"""The folders of a run's checkpoints on disk: names, what is complete, how one appears and goes in one piece.

A checkpoint is written aside (`.tmp_step_N`), synced to disk, marked COMPLETE and then renamed, so a folder with the
final name is whole whenever the process was killed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.schema import CHECKPOINT_MARKER

STATE_FILE = "state.json"
METADATA_FILE = ".metadata"  # written last by torch.distributed.checkpoint
STEP_NAME = re.compile(r"step_(\d{6,})")


def step_name(step: int) -> str:
    return f"step_{step:06d}"


def steps_in(folder: Path) -> dict[int, Path]:
    """The complete checkpoints in a folder by step, ascending."""
    found = {int(match[1]): path for path in folder.glob("step_*") if (match := STEP_NAME.fullmatch(path.name))}
    return {step: path for step, path in sorted(found.items()) if is_complete(path)}


def newest_complete(folder: Path) -> Path | None:
    """The complete checkpoint of the highest step in the folder; None when there is none."""
    complete = list(steps_in(folder).values())
    return complete[-1] if complete else None


def is_complete(path: Path) -> bool:
    """Whether a save into this folder ran to its end."""
    return (path / CHECKPOINT_MARKER).exists() and (path / METADATA_FILE).exists()


def make_empty(folder: Path) -> None:
    for killed in folder.parent.glob(".tmp_step_*"):  # an earlier start may have been killed while writing one
        shutil.rmtree(killed, ignore_errors=True)
    folder.mkdir(parents=True)


def commit(aside: Path, final: Path, info: dict[str, Any], at: Callable[[str], None] = lambda point: None) -> None:
    """Give a completely written folder its marker and its name; `at` hears of each point that is passed."""
    _write_synced(aside / STATE_FILE, json.dumps(info, indent=1))
    _sync_folder(aside)
    at("state")
    _write_synced(aside / CHECKPOINT_MARKER, "")
    _sync_folder(aside)
    at("marker")
    replaced = aside.with_name(f"{aside.name}_replaced")
    if final.exists():  # an incomplete folder of the same step, or a complete one of a run started over
        final.rename(replaced)  # in one piece: half deleted it could still look complete
        at("replaced")
    aside.rename(final)
    _sync_folder(final.parent)
    at("renamed")
    shutil.rmtree(replaced, ignore_errors=True)


def remove(path: Path) -> None:
    """Delete a complete checkpoint; a kill half way leaves no folder that looks complete."""
    (path / CHECKPOINT_MARKER).unlink()
    shutil.rmtree(path, ignore_errors=True)


def _write_synced(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
