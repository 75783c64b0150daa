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

from trainer.files import sync_folder
from trainer.schema import CHECKPOINT_MARKER

STATE_FILE = "state.json"
METADATA_FILE = ".metadata"  # written last by torch.distributed.checkpoint
STEP_NAME = re.compile(r"step_(\d{6,})")


def step_name(step: int) -> str:
    return f"step_{step:06d}"


def steps_in(folder: Path) -> dict[int, Path]:
    """The complete checkpoints in a folder by step, ascending."""
    return {step: path for step, path in _named(folder).items() if is_complete(path)}


def newest_complete(folder: Path) -> Path | None:
    """The complete checkpoint of the highest step in the folder; None when there is none."""
    complete = list(steps_in(folder).values())
    return complete[-1] if complete else None


def is_complete(path: Path) -> bool:
    """Whether a save into this folder ran to its end."""
    return (path / CHECKPOINT_MARKER).exists() and (path / METADATA_FILE).exists()


def incomplete_in(folder: Path) -> dict[int, Path]:
    """The folders with a checkpoint's final name that are not complete, by step, ascending."""
    return {step: path for step, path in _named(folder).items() if not is_complete(path)}


def missing(path: Path) -> str:
    """Why a folder is no complete checkpoint: `it has no COMPLETE file`."""
    names = [name for name in (CHECKPOINT_MARKER, METADATA_FILE) if not (path / name).exists()]
    return f"it has no {' and no '.join(names)} file" if path.is_dir() else "there is no such folder"


def set_aside(path: Path) -> Path:
    """Rename a checkpoint that cannot be used to `.bad_step_N`, which nobody looks at, and return that."""
    taken = len(list(path.parent.glob(f".bad_{path.name}*")))
    aside = path.with_name(f".bad_{path.name}" + (f"_{taken}" if taken else ""))
    path.rename(aside)
    return aside


def make_empty(folder: Path) -> None:
    for killed in folder.parent.glob(".tmp_step_*"):  # an earlier start may have been killed while writing one
        shutil.rmtree(killed, ignore_errors=True)
    folder.mkdir(parents=True)


def commit(aside: Path, final: Path, info: dict[str, Any], at: Callable[[str], None] = lambda point: None) -> None:
    """Give a completely written folder its marker and its name; `at` hears of each point that is passed."""
    _write_synced(aside / STATE_FILE, json.dumps(info, indent=1))
    sync_folder(aside)
    at("state")
    _write_synced(aside / CHECKPOINT_MARKER, "")
    sync_folder(aside)
    at("marker")
    replaced = aside.with_name(f"{aside.name}_replaced")
    if final.exists():  # an incomplete folder of the same step, or a complete one of a run started over
        final.rename(replaced)  # in one piece: half deleted it could still look complete
        at("replaced")
    aside.rename(final)
    sync_folder(final.parent)
    at("renamed")
    shutil.rmtree(replaced, ignore_errors=True)


def remove(path: Path) -> None:
    """Delete a complete checkpoint; a kill half way leaves what the next save removes, and no half of one."""
    doomed = path.with_name(f".tmp_{path.name}_removed")
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _named(folder: Path) -> dict[int, Path]:
    found = {int(match[1]): path for path in folder.glob("step_*") if (match := STEP_NAME.fullmatch(path.name))}
    return dict(sorted(found.items()))


def _write_synced(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
