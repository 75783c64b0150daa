"""Files that are whole or as before, whenever the process ends or the power goes; reading those that others may change;
room for them."""

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
    """The path with a leading ~ or ~USER replaced; as it is where there is no such user."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - Path's own raises RuntimeError


def replace_text(path: Path, text: str) -> None:
    """Write a file aside and give it its name in one step."""
    replace_bytes(path, text.encode())


def replace_bytes(path: Path, content: bytes) -> None:
    """Like `replace_text`, for bytes."""
    aside = path.with_name(f".tmp_{path.name}_{os.getpid()}")  # a rank and its launcher may write at once
    write_synced(aside, content)  # else its name may be on disk before what is in it
    aside.replace(path)


def write_synced(path: Path, content: bytes) -> None:
    """Write a file whose content is on disk then; its name is not, for sure."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def read_up_to(path: Path, most: int) -> bytes:
    """The bytes of a file; of one that is longer than `most`, one more than that."""
    with path.open("rb") as file:
        return file.read(most + 1)


class FileChangedError(OSError):
    """A file is not the one any more that was opened; `strerror` says `has changed while it was read: …, now …`."""


class OpenFile:
    """A file to read from at any place and by any thread, as it was when it was opened; never a part of it mapped.

    In a map one looks at a file that became shorter, or whose disk fails, and the kernel ends the process (SIGBUS).
    Here both are an OSError. What was opened stays readable when its name goes, or is given to another file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)
        self._found = os.fstat(self._descriptor)
        self.size_bytes = self._found.st_size

    def read(self, *pieces: tuple[int, int]) -> list[bytes]:
        """The bytes of each (offset, size). Raises FileChangedError, and OSError for more than the file has."""
        found = [os.pread(self._descriptor, size, offset) for offset, size in pieces]
        for number, (offset, size) in enumerate(pieces):
            if len(found[number]) < size:
                whole = bytearray(size)
                self._fill(memoryview(whole), offset)
                found[number] = bytes(whole)
        self.check()
        return found

    def read_into(self, buffer: Any, offset: int) -> None:
        """Fill a writable buffer with what stands at an offset; raises as `read` does."""
        self._fill(memoryview(buffer).cast("B"), offset)
        self.check()

    def _fill(self, view: memoryview, offset: int) -> None:
        done = 0
        while done < len(view):  # the system reads 2 GiB at a time, at most
            count = os.preadv(self._descriptor, [view[done:]], offset + done)
            if count == 0:
                self.check()
                raise OSError(errno.EINVAL, f"it ends after {self.size_bytes:,} bytes, and more was looked for")
            done += count

    def stream(self) -> BinaryIO:
        """The file from its beginning on, once. One that becomes shorter seems to end early; `check` tells."""
        return os.fdopen(self._descriptor, "rb", closefd=False)

    def check(self) -> None:
        """Raise FileChangedError where size or time are not what they were."""
        now, before = os.fstat(self._descriptor), self._found
        if (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
            told = f"has changed while it was read: {_size_and_time(before)}, now {_size_and_time(now)}"
            raise FileChangedError(errno.ESTALE, told)


def _size_and_time(found: os.stat_result) -> str:
    return f"{found.st_size:,} bytes of {datetime.fromtimestamp(found.st_mtime):%Y-%m-%d %H:%M:%S}"


def why_unreadable(error: OSError) -> str:
    """What follows a file's name: `has changed while it was read: …`, or `cannot be read: Input/output error`."""
    told = error.strerror or str(error)
    return told if isinstance(error, FileChangedError) else f"cannot be read: {told}"


def remove_tree(folder: Path) -> None:
    """Remove a folder with all that is in it, as far as the system lets it go; however deep, which shutil's is not."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except RecursionError:
        with suppress(OSError):
            _flatten(folder)
            shutil.rmtree(folder, ignore_errors=True)


def _flatten(folder: Path) -> None:
    """Bring each folder below to right below it: paths stay short, and nobody calls himself."""
    waiting, number = [folder], 0
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            inner = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
        for path in inner:
            number += 1
            waiting.append(folder / f".removed_{os.getpid()}_{number}")
            Path(path).rename(waiting[-1])


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on disk. Raises OSError on file systems that cannot."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lack_of_room(folder: Path, needed: int) -> str | None:
    """`it needs 2.00 GiB and 1.25 GiB are free` where a disk cannot take so many bytes; else None."""
    free = shutil.disk_usage(folder).free
    return None if free >= needed else f"it needs {render_bytes(needed)} and {render_bytes(free)} are free"
