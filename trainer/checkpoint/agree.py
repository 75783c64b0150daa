"""Finds the checkpoints that several storages hold together, and finishes those that a kill has left unfinished.

Every rank must call the functions with a group; only the first rank on each storage touches its files.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.checkpoint.errors import CheckpointError
from trainer.checkpoint.folders import (
    METADATA_FILE,
    STATE_FILE,
    DamagedError,
    aside_name,
    is_complete,
    missing,
    named_steps,
    read_state,
    restore_replaced,
    seal,
    step_name,
)
from trainer.checkpoint.spread import Agreement, Holding, Spread, agree
from trainer.dist import Group, gather
from trainer.files import read_up_to
from trainer.nodes import Storages
from trainer.typed import MAX_BYTES, InvalidData, from_json, parse_json

ASIDE = re.compile(r"\.tmp_step_(\d{6,18})")


def settle(folder: Path, storages: Storages, rank: int, group: Group) -> Agreement:
    """What the storages hold of the checkpoints in their folders, after each has finished what another one has.

    `folder` may have another path on each storage. Raises CheckpointError on every rank if one cannot be read or
    written.
    """
    agreed = _agree(_look(folder) if _is_keeper(storages, rank) else ([], ""), storages, group)
    failed = _roll_forward(folder, agreed.whole) if _is_keeper(storages, rank) else ""
    _raise_first(gather(failed, group))
    return agreed


def has_unfinished(folder: Path) -> bool:
    """Whether a save into this folder has ended after its part was prepared: another part may be complete."""
    try:
        return bool(_prepared(folder))
    except OSError:  # the save itself will say so
        return False


def agree_on(path: Path, storages: Storages, rank: int, group: Group) -> Agreement:
    """The same for one checkpoint that a config names, without a change to any file."""
    mine = ([holding_of(path)] if path.is_dir() else [], "") if _is_keeper(storages, rank) else ([], "")
    return _agree(mine, storages, group)


def holding_of(path: Path) -> Holding:
    """What a folder with a checkpoint's final name is worth."""
    step = _step_of(path)
    if not is_complete(path):
        return Holding(step, "", False, missing(path))
    try:
        info, _ = read_state(path)
    except (DamagedError, OSError) as error:
        return Holding(step, "", True, str(error))
    return Holding(int(info["step"]), identity(info, read_up_to(path / STATE_FILE, MAX_BYTES)), True)


def identity(info: Mapping[str, Any], state: bytes) -> str:
    """Equal for the parts of one save, and for copies of a checkpoint in one piece."""
    spread = from_json(info["spread"], Spread) if info.get("spread") else None
    return spread.save if spread is not None else hashlib.sha256(state).hexdigest()


def _is_keeper(storages: Storages, rank: int) -> bool:
    return storages.keeper(rank) == rank


def _agree(mine: tuple[list[Holding], str], storages: Storages, group: Group) -> Agreement:
    told = gather(mine, group)
    _raise_first([why for _, why in told])
    return agree([told[keeper][0] for keeper in storages.keepers], storages.names)


def _raise_first(reasons: Sequence[str]) -> None:
    for why in reasons:
        if why:
            raise CheckpointError(why)


def _look(folder: Path) -> tuple[list[Holding], str]:
    """What is in a folder, and why it could not be read."""
    try:
        restore_replaced(folder)
        found = [holding_of(path) for path in named_steps(folder).values()]
        return [*found, *_prepared(folder)], ""
    except OSError as error:
        return [], f"cannot list the checkpoints in {folder}: {error.strerror or error}"


def _prepared(folder: Path) -> list[Holding]:
    """Parts that have everything but marker and name."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = ASIDE.fullmatch(path.name)
        if match is None or not (path / METADATA_FILE).exists():
            continue
        try:
            state = read_up_to(path / STATE_FILE, MAX_BYTES)
            info = parse_json(state)
            found.append(Holding(int(match[1]), from_json(info["spread"], Spread).save, False))
        except (OSError, InvalidData, KeyError, TypeError):  # it was not prepared: the next save removes it
            continue
    return found


def _roll_forward(folder: Path, whole: Sequence[tuple[int, str]]) -> str:
    """Give a prepared part its marker and its name, if the checkpoint is whole. Returns why that failed."""
    prepared = {(one.step, one.save) for one in _prepared(folder)}
    for step, save in whole:
        if (step, save) in prepared:
            aside, final = folder / aside_name(step), folder / step_name(step)
            try:
                seal(aside, final, (aside / STATE_FILE).read_bytes())
            except OSError as error:
                return f"cannot finish {final}: {error.strerror or error}"
    return ""


def _step_of(path: Path) -> int:
    digits = path.name.removeprefix("step_")
    return int(digits) if digits.isdigit() else 0
