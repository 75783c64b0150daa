"""The folders of a run's checkpoints on disk: their names, which are complete, how one is committed or removed in one
step, and whether its files still have the written content.

A checkpoint is written to `.tmp_step_N`, synced to disk, marked COMPLETE and then renamed. So a folder with the final
name is complete, even if the process was killed at any time. The length and CRC-32 of each file are computed while
writing: 0.4 s per GB (2.5 GB/s on one core), outside the GIL and in the writer's thread. torch.load does not check
torch's own CRC inside each record of a shard. `state.json` stores them, and the marker stores those of `state.json`.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Annotated, Any, BinaryIO, cast

from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem

from trainer.checkpoint.spread import Spread
from trainer.files import read_up_to, remove_tree, sync_folder, write_synced
from trainer.schema import CHECKPOINT_MARKER
from trainer.typed import MAX_BYTES, Count, InvalidData, Size, Within, from_json, parse_json
from trainer.words import first_few

STATE_FILE = "state.json"
METADATA_FILE = ".metadata"  # written last by torch.distributed.checkpoint
STEP_NAME = re.compile(r"step_(\d{6,18})")
SHARD_NAME = re.compile(r"__(\d{1,9})_\d+\.distcp")
REPLACED_NAME = re.compile(r"\.tmp_(step_\d{6,18})_replaced")
RANDOM_NAME = re.compile(r"random_(\d{1,9})\.pt")
Manifest = dict[str, list[int]]
"""{file name: [bytes, CRC-32]}."""
FORMAT = 3
"""The folder's format. 2: the optimizer's state by parameter name without its groups, and `files`. 3: the marker
contains the checksum of `state.json`."""
SPREAD_FORMAT = 4
"""The format of one storage's part of a checkpoint: `files` are those of this part, `spread` names all parts."""
CHECKSUMMED_MARKER_FORMAT = 3
"""From this format on, an empty marker means damage."""
MARKER_BYTES = 4096
"""A marker's maximum size."""
PIECE_BYTES = 16 * 2**20


class DamagedError(Exception):
    """A checkpoint's files differ from what was written; the message names the file and the difference."""


def step_name(step: int) -> str:
    return f"step_{step:06d}"


def aside_name(step: int) -> str:
    """The folder's name until it is complete."""
    return f".tmp_{step_name(step)}"


def steps_in(folder: Path) -> dict[int, Path]:
    """The complete checkpoints in a folder by step, ascending."""
    return {step: path for step, path in named_steps(folder).items() if is_complete(path)}


def newest_complete(folder: Path) -> Path | None:
    """The complete checkpoint of the highest step in the folder; None if there is none."""
    complete = list(steps_in(folder).values())
    return complete[-1] if complete else None


def is_complete(path: Path) -> bool:
    """Whether a save into this folder was finished."""
    return (path / CHECKPOINT_MARKER).exists() and (path / METADATA_FILE).exists()


def restore_replaced(folder: Path) -> dict[int, Path]:
    """Restore checkpoints whose replacement was interrupted. Returns incomplete `step_N` folders by step, ascending.
    Call it only while this process holds the run folder's lock."""
    paths = _listed(folder)
    back = [final for path in paths if (final := _put_back(path)) is not None]
    return {step: path for step, path in _steps_of([*paths, *back]).items() if not is_complete(path)}


def _put_back(path: Path) -> Path | None:
    """If `path` is a complete checkpoint that was renamed to be replaced, and its final name is free, rename it back
    and return that: retention may have deleted all earlier ones. Else None."""
    match = REPLACED_NAME.fullmatch(path.name)
    if match is None or (final := path.with_name(match[1])).exists() or not is_complete(path):
        return None
    path.rename(final)
    return final


def missing(path: Path) -> str:
    """Why a folder is not a complete checkpoint: `it has no COMPLETE file`."""
    names = [name for name in (CHECKPOINT_MARKER, METADATA_FILE) if not (path / name).exists()]
    return f"it has no {' and no '.join(names)} file" if path.is_dir() else "there is no such folder"


def set_aside(path: Path) -> Path:
    """Rename an unusable checkpoint to `.bad_step_N`, which no code reads, and return the new path."""
    names = (f".bad_{path.name}" + (f"_{number}" if number else "") for number in count())
    taken = {other.name for other in path.parent.iterdir()}
    aside = path.with_name(next(name for name in names if name not in taken))
    path.rename(aside)
    return aside


def make_empty(folder: Path) -> None:
    for killed in folder.parent.glob(".tmp_step_*"):  # an earlier start may have been killed while writing one
        if _put_back(killed) is None:
            remove_tree(killed)
    folder.mkdir(parents=True)


def commit(
    aside: Path, final: Path, info: dict[str, Any], on_stage: Callable[[str], None] = lambda stage: None
) -> None:
    """Give a completely written folder its marker and its final name. `on_stage` is called after each stage."""
    state = prepare(aside, info)
    on_stage("state")
    seal(aside, final, state, on_stage)


def prepare(aside: Path, info: dict[str, Any]) -> bytes:
    """Write `state.json` into a completely written folder, and return its content: only `seal` is left to do."""
    state = json.dumps(info, indent=1).encode()
    write_synced(aside / STATE_FILE, state)
    sync_folder(aside)
    return state


def seal(aside: Path, final: Path, state: bytes, on_stage: Callable[[str], None] = lambda stage: None) -> None:
    """Give a prepared folder its marker and its final name. `state`: the content of its `state.json`."""
    write_synced(aside / CHECKPOINT_MARKER, render_marker(state))
    sync_folder(aside)
    on_stage("marker")
    replaced = aside.with_name(f"{aside.name}_replaced")
    if final.exists():  # an incomplete folder of the same step, or a complete one of a run started over
        final.rename(replaced)  # in one step: a half-deleted folder could still look complete
        on_stage("replaced")  # after a kill here, `restore_replaced` restores it
    try:
        aside.rename(final)
    except OSError:
        _put_back(replaced)
        raise
    sync_folder(final.parent)
    on_stage("renamed")
    remove_tree(replaced)


def render_marker(state: bytes) -> bytes:
    """The content of the marker for this `state.json`."""
    return json.dumps({STATE_FILE: entry_of(state)}).encode()


@dataclass(frozen=True)
class Saved:
    """The fields of `state.json` that the trainer reads, and the recipe's own state."""

    step: Count
    world_size: Annotated[int, Within(1, 1 << 20)]
    format: Size = 1
    files: dict[str, tuple[Count, Count]] | None = None
    shape: dict[str, Any] | None = None
    config: dict[str, Any] | None = None
    part: dict[str, str] | None = None
    hashes: dict[str, str] | None = None
    data: dict[str, Any] | None = None
    recipe: Any = None
    total_steps: Size | None = None
    eval_loss: float | None = None
    eval_loss_first: float | None = None
    eval_loss_last: float | None = None
    eval_loss_best: float | None = None
    eval_loss_best_trained: float | None = None
    eval_step_best: Count | None = None
    eval_step: Count | None = None
    evals_without_gain: Count | None = None
    spread: Spread | None = None


def read_state(folder: Path) -> tuple[dict[str, Any], bool]:
    """The content of `state.json`, and whether its checksum was verified: before format 3 the marker is empty.

    Raises DamagedError if it differs from what was written or from the types of `Saved`, and OSError.
    """
    state, marker = read_up_to(folder / STATE_FILE, MAX_BYTES), read_up_to(folder / CHECKPOINT_MARKER, MARKER_BYTES)
    if marker:
        wrong = _difference(entry_of(state), parse_marker(marker))
        if wrong:
            raise DamagedError(f"{STATE_FILE} {wrong}")
    try:
        info = parse_json(state)
        from_json(info, Saved)
    except InvalidData as damage:
        raise DamagedError(f"{STATE_FILE}: {damage}") from None
    if not marker and info.get("format", 1) >= CHECKSUMMED_MARKER_FORMAT:
        raise DamagedError(
            f"{CHECKPOINT_MARKER} is empty, and holds the checksum of {STATE_FILE} in format {info['format']}"
        )
    return info, bool(marker)


def parse_marker(marker: bytes) -> list[int]:
    """The length and CRC-32 of `state.json` from its marker. Raises DamagedError."""
    with suppress(InvalidData):
        says = from_json(parse_json(marker, most=MARKER_BYTES), dict[str, Any])
        return list(from_json(says.get(STATE_FILE), tuple[Count, Count]))
    raise DamagedError(f"{CHECKPOINT_MARKER} has other content than was written")


def remove(path: Path) -> None:
    """Delete a complete checkpoint. If the process is killed meanwhile, no incomplete checkpoint remains; the next save
    removes the rest."""
    doomed = path.with_name(f".tmp_{path.name}_removed")
    path.rename(doomed)
    remove_tree(doomed)


def named_steps(folder: Path) -> dict[int, Path]:
    """The folders with a checkpoint's name by step, ascending.

    Raises OSError if an existing folder cannot be listed: else the run would start from the beginning and delete its
    checkpoints. Since Python 3.12 Path.glob finds nothing in such a folder.
    """
    return _steps_of(_listed(folder))


def _listed(folder: Path) -> list[Path]:
    with suppress(FileNotFoundError, NotADirectoryError):
        return list(folder.iterdir())
    return []


def _steps_of(paths: Iterable[Path]) -> dict[int, Path]:
    found = {int(match[1]): path for path in paths if (match := STEP_NAME.fullmatch(path.name))}
    return dict(sorted(found.items()))


# --- content ---------------------------------------------------------------------------------------------------------


class ChecksummingWriter(FileSystemWriter):
    """Torch's writer of shards; also records the length and checksum of every file that it writes."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.manifest: Manifest = {}
        self.fs = _ChecksummingFiles(self.manifest)


class _ChecksummingFiles(FileSystem):
    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            file = ChecksummedFile(cast("BinaryIO", stream))
            yield file
            # torch writes its metadata under another name and renames it
            self._manifest[Path(path).name.removesuffix(".tmp")] = file.entry()


class ChecksummedFile:
    """Wraps a file that is written sequentially, and computes its length and checksum. Everything except `write`,
    `fileno` and `entry` is passed on to the file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._length = 0
        self._crc = 0

    def write(self, data: Any) -> int:
        self._crc = zlib.crc32(data, self._crc)
        self._length += memoryview(data).nbytes
        return self._file.write(data)

    def fileno(self) -> int:
        """Flushes first, for a caller that syncs the file: Python's buffer would not be synced, e.g. all of torch's
        metadata."""
        self._file.flush()
        return self._file.fileno()

    def entry(self) -> list[int]:
        return [self._length, self._crc]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def damages(folder: Path, manifest: Manifest) -> list[str]:
    """What is wrong with which files; empty if all are unchanged since they were written."""
    return [f"{name} {wrong}" for name, entry in manifest.items() if (wrong := _damage(folder / name, *entry))]


def disagreements(folder: Path, info: Mapping[str, Any]) -> list[str]:
    """Where a checkpoint's `state.json` contradicts itself, the folder's name or the names of the folder's files."""
    step, world_size, data = info["step"], info["world_size"], info.get("data")
    found = []
    named = STEP_NAME.fullmatch(folder.name)
    if named and int(named[1]) != step:
        found.append(f"{STATE_FILE} is of step {step}, not of the step in the folder's name")
    if isinstance(data, Mapping) and data.get("step", step) != step:
        found.append(f"{STATE_FILE} is of step {step}, and its place in the data is after step {data['step']}")
    if "files" in info:
        spread = from_json(info["spread"], Spread) if info.get("spread") else None
        found += _strange_files(folder, info["files"], world_size, elsewhere=spread.entries if spread else {})
    return found


def _strange_files(folder: Path, manifest: Manifest, world_size: int, *, elsewhere: Collection[str]) -> list[str]:
    """Names in the manifest that do not fit the number of ranks, and files in the folder that neither it lists nor
    another part of the checkpoint: `elsewhere`."""
    ranks = {int(match[1]) for name in manifest if (match := RANDOM_NAME.fullmatch(name))}
    writers = {int(match[1]) for name in manifest if (match := SHARD_NAME.fullmatch(name))}
    found = []
    if ranks != set(range(world_size)):
        found.append(f"{STATE_FILE} has world_size {world_size} and random states of the ranks {_few(ranks)}")
    if not writers <= ranks:
        found.append(f"{STATE_FILE} has world_size {world_size} and shards of the ranks {_few(writers)}")
    if METADATA_FILE not in manifest:
        found.append(f"{STATE_FILE} does not name {METADATA_FILE}")
    outside = [name for name in manifest if Path(name).name != name or "\0" in name]
    if outside:
        found.append(f"{STATE_FILE} names {first_few(outside, 3)}, which is not in its folder")
    # further files with such names come from elsewhere; other files (an editor's, a file system's) are not read
    ours = {
        file.name for file in folder.iterdir() if SHARD_NAME.fullmatch(file.name) or RANDOM_NAME.fullmatch(file.name)
    }
    strays = sorted(ours - set(manifest) - set(elsewhere))
    if strays:
        found.append(f"{first_few(strays, 3)} is not of this checkpoint: {STATE_FILE} does not name it")
    return found


def _few(numbers: set[int]) -> str:
    return f"[{first_few([str(number) for number in sorted(numbers)], 8)}]"


def share(manifest: Manifest, rank: int, world_size: int) -> Manifest:
    """The files that one rank checks; together the ranks check each file once."""
    return {name: manifest[name] for name in sorted(manifest)[rank::world_size]}


def _damage(path: Path, length: int, crc: int) -> str | None:
    try:
        found = path.stat().st_size
        return _difference([found, _checksum(path) if found == length else 0], [length, crc])
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def _difference(found: list[int], written: list[int]) -> str | None:
    if found[0] != written[0]:
        return f"has {found[0]} bytes, not {written[0]}"
    return None if found == written else f"has other content than was written (CRC-32 is not {written[1]:08x})"


def entry_of(data: bytes) -> list[int]:
    """A content's entry in a manifest."""
    return [len(data), zlib.crc32(data)]


def _checksum(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            crc = zlib.crc32(piece, crc)
    return crc
