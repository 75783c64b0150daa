"""A job's files brought home."""

from __future__ import annotations

import math
import os
import stat
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from deployer.errors import FerryError, HostError
from deployer.host import Host
from deployer.link import Link

RESULT_PARTS = (
    "metrics.jsonl",
    "config.yaml",
    "job.json",
    "git.patch",
    "status.json",
    "outcome.json",
    "logs",
    "export",
)
CHECKPOINT_PARTS = ("checkpoints",)
FETCH_BYTES = 256 << 20
"""One request brings this much at most, so that a broken connection costs little."""


@dataclass(frozen=True)
class RemoteFile:
    path: str  # relative to the job folder
    size: int
    mtime: float


@dataclass(frozen=True)
class Pulled:
    files: int
    size_bytes: int
    left_out: tuple[RemoteFile, ...]
    """Not brought home because all of it together exceeds the limit."""


def pull(
    host: Host,
    job_id: str,
    *,
    target: Path,
    parts: Sequence[str] = RESULT_PARTS,
    max_bytes: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Pulled:
    """Copies parts of a job's folder into `target`, each file complete or absent; what is there unchanged is kept.

    When the export would exceed max_bytes it is left out and named in the result. HostError for a file that shrank or
    for a name that would leave the target.
    """
    with host.connect(request={"op": "files", "job": job_id, "parts": list(parts)}) as link:
        listed = [parse_file(row) for row in link.first.result("files")]
        kept, left_out = _within(listed, max_bytes)
        wanted = [file for file in kept if not _is_here(target, file)]
        total, done = sum(file.size for file in wanted), 0
        for file in wanted:
            try:
                for count in _fetch(link, job_id, file, target):
                    done += count
                    progress(done, total)
            except OSError as error:
                reason = error.strerror or str(error)
                raise FerryError(
                    f"cannot write {target / file.path}: {reason}", hint="--to names another folder"
                ) from None
    return Pulled(len(kept), sum(file.size for file in kept), tuple(left_out))


def _within(files: Sequence[RemoteFile], max_bytes: int | None) -> tuple[list[RemoteFile], list[RemoteFile]]:
    if max_bytes is None or sum(file.size for file in files) <= max_bytes:
        return list(files), []
    small = [file for file in files if not file.path.startswith(("export/", "checkpoints/"))]
    return small, [file for file in files if file not in small]


def parse_file(row: Any) -> RemoteFile:
    """A file as a host lists it. HostError for what is no path below the job's folder with a size and a time."""
    try:
        path, size, mtime = row
        file = RemoteFile(str(path), int(size), float(mtime))
    except (TypeError, ValueError, OverflowError):
        raise HostError(f"the host lists {row!r}, which is no file") from None
    check_name(file.path)
    if file.size < 0 or not math.isfinite(file.mtime) or abs(file.mtime) > 1e11:
        raise HostError(f"the host lists {file.path!r} with {size} bytes of time {mtime}")
    return file


def check_name(path: str) -> None:
    """HostError for a name from a host that would leave the target folder or drive a terminal."""
    parts = path.split("/")
    if (
        not path
        or any(part in ("", ".", "..") for part in parts)
        or any(ord(c) < 32 or 127 <= ord(c) < 160 for c in path)
    ):
        raise HostError(f"the host names a file {path!r}, which is not a path below the job's folder")


def _is_here(target: Path, file: RemoteFile) -> bool:
    try:
        info = (target / file.path).lstat()
    except OSError:
        return False
    return stat.S_ISREG(info.st_mode) and info.st_size == file.size and abs(info.st_mtime - file.mtime) < 1e-3


def _fetch(link: Link, job_id: str, file: RemoteFile, target: Path) -> Iterable[int]:
    """Brings one file to a temporary name beside its own, then renames it; yields the bytes as they come."""
    place = target / file.path
    place.parent.mkdir(parents=True, exist_ok=True)
    if not place.parent.resolve().is_relative_to(target.resolve()):
        raise HostError(f"{place} lies behind a link that leaves {target}")
    fd, temp = tempfile.mkstemp(dir=place.parent, prefix=".pull-")
    try:
        with os.fdopen(fd, "wb") as out:
            yield from _fetch_into(out, link, job_id, file)
        os.utime(temp, (file.mtime, file.mtime))
        Path(temp).replace(place)
    except BaseException:
        Path(temp).unlink(missing_ok=True)
        raise


def _fetch_into(out: BinaryIO, link: Link, job_id: str, file: RemoteFile) -> Iterable[int]:
    offset = 0
    while offset < file.size:
        size = min(FETCH_BYTES, file.size - offset)
        got = 0
        for name, _, data in link.call("fetch", job=job_id, path=file.path, offset=offset, size=size).events():
            if name == "data":
                got += len(data)
                if got > size:
                    raise HostError(f"the host sends more of {file.path} than was asked for")
                out.write(data)
                yield len(data)
        if got < size:
            raise HostError(f"{file.path} became shorter while it was copied", hint="pull again")
        offset += got
