"""The supervisor's work on logs while the ranks write them: records when they grew, and keeps their size limit.

The ranks append to their files themselves. A hole punched into the beginning of a file returns its blocks to the disk:
offsets do not change, nothing is copied, and the rank notices nothing. The freed part is recorded first.
Stdlib only, Python 3.8, Linux.
"""

import os
import time
from typing import Dict, Optional

from ..host.files import write_json
from .dropped import DROPPED_FILE, LIMIT_KEY, Dropped
from .times import EVERY_S, TimeIndex, sizes_of

KEPT_SHARE = 0.9
"""The share of the limit that is kept when it is exceeded, so that a tenth is freed each time."""
LINE_SEARCH = 64 << 10
"""The kept part begins at the next line start within this many bytes."""

_KEEP_SIZE, _PUNCH_HOLE = 1, 2


def first_to_keep(size: int, first_kept: int, limit: int) -> Optional[int]:
    """The new start of a file's kept part; None while the file is within the limit."""
    return None if size - first_kept <= limit else size - int(limit * KEPT_SHARE)


class LogKeeper:
    """Maintains one folder of logs."""

    def __init__(self, folder: str, limit_bytes: Optional[int]) -> None:
        self._folder = folder
        self._index = TimeIndex(folder)
        self._limit = LogLimit(folder, limit_bytes) if limit_bytes else None
        self._due = 0.0

    def look(self, *, now: bool = False) -> Optional[str]:
        """Does its work, at most every EVERY_S unless `now`. Returns a warning for the job's status, once."""
        if time.monotonic() < self._due and not now:
            return None
        self._due = time.monotonic() + EVERY_S
        sizes = sizes_of(self._folder)
        self._index.note(sizes)
        return self._limit.apply(sizes) if self._limit else None


class LogLimit:
    """Keeps every log of one folder within `limit_bytes`."""

    def __init__(self, folder: str, limit_bytes: int) -> None:
        self._folder = folder
        self._limit = limit_bytes
        self._dropped: Dict[str, int] = dict(Dropped(folder).read(), **{LIMIT_KEY: limit_bytes})
        self._off = False

    def apply(self, sizes: Dict[str, int]) -> Optional[str]:
        """Frees the part beyond the limit. If this file system cannot, returns a warning once, and everything is
        kept."""
        for name, size in sizes.items():
            if size < self._dropped.get(name, 0):  # another file has its name, or it was cut
                self._forget(name)
            first = None if self._off else first_to_keep(size, self._dropped.get(name, 0), self._limit)
            if first is None:
                continue
            try:
                self._drop(name, first)
            except OSError as error:
                self._off = True
                return "--log-max: this disk cannot free a part of a log, all of it is kept: %s" % error.strerror
        return None

    def _drop(self, name: str, first: int) -> None:
        path = os.path.join(self._folder, name)
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        try:
            first = _next_line(fd, first)
            before = self._dropped
            if name not in before:
                _try_punching(self._folder)
            self._write(dict(before, **{name: first}))
            try:
                _punch(fd, before.get(name, 0), first)
            except OSError:
                self._write(before)
                raise
        finally:
            os.close(fd)

    def _forget(self, name: str) -> None:
        try:
            self._write({other: first for other, first in self._dropped.items() if other != name})
        except OSError:  # a full disk; the next look tries again
            pass

    def _write(self, dropped: Dict[str, int]) -> None:
        write_json(os.path.join(self._folder, DROPPED_FILE), dropped)
        self._dropped = dropped


def _next_line(fd: int, offset: int) -> int:
    """The start of the next line; `offset` itself if there is none within LINE_SEARCH."""
    newline = os.pread(fd, LINE_SEARCH, offset).find(b"\n")
    return offset if newline < 0 else offset + newline + 1


def _try_punching(folder: str) -> None:
    """Raises OSError if the file system cannot punch holes."""
    path = os.path.join(folder, ".punch.%d" % os.getpid())
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        os.write(fd, bytes(8192))
        _punch(fd, 0, 4096)
    finally:
        os.close(fd)
        os.unlink(path)


def _punch(fd: int, start: int, end: int) -> None:
    """Frees the whole blocks of a file between two offsets; they read as zeros, the size stays."""
    block = max(os.fstat(fd).st_blksize, 4096)
    start, end = start // block * block, end // block * block
    if end <= start:
        return
    import ctypes  # hardly ever needed, and not quick to load

    fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate64", None)
    if fallocate is None:  # musl: its off_t has 64 bits anyway
        fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    if fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, start, end - start):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
