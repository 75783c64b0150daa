"""Writes files atomically, also if the process ends or the power fails; reads files that others may change; checks
free disk space."""

from __future__ import annotations

import errno
import os
import shutil
import weakref
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

from trainer.words import render_bytes


def expanded(path: str | Path) -> Path:
    """The path with a leading ~ or ~USER replaced; unchanged if there is no such user."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - Path's own raises RuntimeError


def replace_text(path: Path, text: str) -> None:
    """Write a temporary file, and rename it to `path` in one step."""
    replace_bytes(path, text.encode())


def replace_bytes(path: Path, content: bytes) -> None:
    """Like `replace_text`, for bytes."""
    aside = path.with_name(f".tmp_{path.name}_{os.getpid()}")  # a rank and its launcher may write at the same time
    write_synced(aside, content)  # else its name may reach the disk before its content
    aside.replace(path)


def write_synced(path: Path, content: bytes) -> None:
    """Write a file and wait until its content is on disk. Its name may not be on disk yet: see `sync_folder`."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def read_up_to(path: Path, most: int) -> bytes:
    """The bytes of a file; if it is longer than `most`, its first `most` + 1 bytes."""
    with path.open("rb") as file:
        return file.read(most + 1)


class FileChangedError(OSError):
    """A file has changed since it was opened. `strerror` is `has changed while it was read: …, now …`."""


class OpenFile:
    """An open file that any thread can read at any offset; a later change to it is an error. Never maps it into memory.

    If a mapped file becomes shorter or its disk fails, the kernel ends the process that reads it (SIGBUS). Here both
    raise an OSError. The opened file stays readable if its name is deleted or given to another file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)
        self._found = os.fstat(self._descriptor)
        self.size_bytes = self._found.st_size

    def read(self, *pieces: tuple[int, int]) -> list[bytes]:
        """The bytes of each (offset, size). Raises FileChangedError, and OSError for bytes beyond the file's end."""
        found = [os.pread(self._descriptor, size, offset) for offset, size in pieces]
        for number, (offset, size) in enumerate(pieces):
            if len(found[number]) < size:
                whole = bytearray(size)
                self._fill(memoryview(whole), offset)
                found[number] = bytes(whole)
        self.check()
        return found

    def read_into(self, buffer: Any, offset: int) -> None:
        """Fill a writable buffer with the bytes from an offset on. Raises the same errors as `read`."""
        self._fill(memoryview(buffer).cast("B"), offset)
        self.check()

    def _fill(self, view: memoryview, offset: int) -> None:
        done = 0
        while done < len(view):  # the system reads at most 2 GiB at a time
            count = os.preadv(self._descriptor, [view[done:]], offset + done)
            if count == 0:
                self.check()
                raise OSError(errno.EINVAL, f"it ends after {self.size_bytes:,} bytes, and more was looked for")
            done += count

    def stream(self) -> BinaryIO:
        """A stream over the file from its beginning, usable once. If the file becomes shorter, the stream ends early
        without an error: call `check` then."""
        return os.fdopen(self._descriptor, "rb", closefd=False)

    def check(self) -> None:
        """Raise FileChangedError if size or modification time have changed."""
        now, before = os.fstat(self._descriptor), self._found
        if (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
            told = f"has changed while it was read: {_size_and_time(before)}, now {_size_and_time(now)}"
            raise FileChangedError(errno.ESTALE, told)


def _size_and_time(found: os.stat_result) -> str:
    return f"{found.st_size:,} bytes of {datetime.fromtimestamp(found.st_mtime):%Y-%m-%d %H:%M:%S}"


def why_unreadable(error: OSError) -> str:
    """Text to follow a file name: `has changed while it was read: …` or `cannot be read: Input/output error`."""
    told = error.strerror or str(error)
    return told if isinstance(error, FileChangedError) else f"cannot be read: {told}"


def remove_tree(folder: Path) -> None:
    """Remove a folder with its content, at any depth (shutil's rmtree has a limit). Ignores the system's errors."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except RecursionError:
        with suppress(OSError):
            _flatten(folder)
            shutil.rmtree(folder, ignore_errors=True)


def _flatten(folder: Path) -> None:
    """Move all nested folders directly below `folder`, without recursion and with short paths."""
    waiting, number = [folder], 0
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            inner = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
        for path in inner:
            number += 1
            waiting.append(folder / f".removed_{os.getpid()}_{number}")
            Path(path).rename(waiting[-1])


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on disk. Raises OSError if the file system cannot do this."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lack_of_room(folder: Path, needed: int) -> str | None:
    """`it needs 2.00 GiB and 1.25 GiB are free` if the folder's disk has less than `needed` bytes free; else None."""
    free = shutil.disk_usage(folder).free
    return None if free >= needed else f"it needs {render_bytes(needed)} and {render_bytes(free)} are free"
