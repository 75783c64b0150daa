"""Identifies a log by its file, not by its name: finds it again after it was renamed, removed or truncated.

A rank's wrapper records the file that it has opened. A reader identifies a log by this file, by its own offset, and by
the last bytes before the offset; with these a client finds the log again over another connection.
Stdlib only, Python 3.8, Linux.
"""

import os
import stat
from typing import Literal, NamedTuple, Optional

from ..host.layout import Job, LogName
from ..host.typed import InvalidData, read_typed

TAIL = 16
"""Number of bytes before an offset that are compared to identify a file."""


class Change(NamedTuple):
    """A change of a log that is being read. `file`: the LogName under which reading continues."""

    file: str
    what: Literal["renamed", "removed", "replaced", "cut", "gone"]
    to: str = ""
    """Its new name."""


class LogMark(NamedTuple):
    """A log's file and the last bytes that were read."""

    inode: int = 0
    tail: bytes = b""

    @property
    def text(self) -> str:
        return "%d:%s" % (self.inode, self.tail.hex())

    @classmethod
    def parse(cls, text: str) -> "LogMark":
        """A LogMark without values if the text is not one."""
        inode, _, tail = text.partition(":")
        try:
            return cls(int(inode), bytes.fromhex(tail[: 2 * TAIL]))
        except ValueError:
            return cls()


class _RankLog(NamedTuple):
    """The fields of a rank's record about its log."""

    pid: int = 0
    log_inode: int = 0


class LogLocation(NamedTuple):
    """A log's current path. `change`: why it is not the original one."""

    path: str
    change: Optional[Change] = None


def named_path(job: Job, name: LogName) -> str:
    return os.path.join(job.logs(name.attempt, name.group.folder), name.file)


def inode_of(path: str) -> int:
    """A file's inode; 0 if it is not a regular file."""
    try:
        found = os.stat(path)
    except OSError:
        return 0
    return found.st_ino if stat.S_ISREG(found.st_mode) else 0


def find_log(job: Job, name: LogName, inode: int = 0) -> Optional[LogLocation]:
    """A log's location: under its name, else under another name in the folder, else through the process that writes it.
    None if it is gone. `inode`: the log's file; by default, the one that the rank's wrapper recorded."""
    path = named_path(job, name)
    here = inode_of(path)
    record = _rank_log(job, name)
    wanted = inode or (record.log_inode if name.copy == 1 else 0)
    if here and wanted in (0, here):
        return LogLocation(path)
    moved = _moved(job, name, wanted, record.pid) if wanted else None
    if moved is not None:
        return moved
    # a file system may give its files new inodes; then only the bytes identify one
    return LogLocation(path, Change(name.text, "replaced") if wanted else None) if here else None


def _moved(job: Job, name: LogName, inode: int, pid: int) -> Optional[LogLocation]:
    folder = job.logs(name.attempt, name.group.folder)
    try:
        others = sorted(os.listdir(folder))
    except OSError:
        others = []
    for other in others:
        if inode_of(os.path.join(folder, other)) == inode:
            return LogLocation(os.path.join(folder, other), Change(name.text, "renamed", other))
    for descriptor in (1, 2) if pid else ():
        path = "/proc/%d/fd/%d" % (pid, descriptor)
        if inode_of(path) == inode:
            return LogLocation(path, Change(name.text, "removed"))
    return None


def _rank_log(job: Job, name: LogName) -> _RankLog:
    if name.rank is None:
        return _RankLog()
    path = os.path.join(job.ranks(name.attempt, name.group.folder), "rank_%d.json" % name.rank)
    try:
        return read_typed(path, _RankLog)
    except (OSError, InvalidData):
        return _RankLog()


def ends_with(fd: int, tail: bytes, offset: int) -> bool:
    """Whether a file reaches up to this offset and has these bytes just before it."""
    tail = tail[-offset:] if offset else b""
    return os.fstat(fd).st_size >= offset and os.pread(fd, len(tail), offset - len(tail)) == tail


class Stream:
    """One file that is being read, under the name that the client uses."""

    def __init__(self, name: LogName, fd: int, offset: int, tail: Optional[bytes] = None) -> None:
        """`tail`: the bytes before `offset` that the client has; by default, the file's bytes there."""
        self.name = name
        self.fd = fd
        self.inode = os.fstat(fd).st_ino
        self.offset = offset
        self.tail = os.pread(fd, min(TAIL, offset), max(0, offset - TAIL)) if tail is None else tail
        self.moved = False
        """Its rename or removal has been reported."""

    @property
    def mark(self) -> LogMark:
        return LogMark(self.inode, self.tail)

    def read(self, size: int, first_kept: int) -> Optional[bytes]:
        """The next bytes, at most `size`. None if the file was truncated, so that the earlier bytes differ. Bytes
        before `first_kept` were dropped and are not compared."""
        there = os.fstat(self.fd).st_size
        if there <= self.offset:
            return b"" if there == self.offset else None
        back = min(len(self.tail), self.offset)
        data = os.pread(self.fd, back + size, self.offset - back)
        if self.offset - back >= first_kept and data[:back] != self.tail[len(self.tail) - back :]:
            return None
        return data[back:]

    def go_on(self, offset: int, data: bytes) -> None:
        """Records that these bytes at this offset were read."""
        before = self.tail if offset == self.offset else b""
        self.offset, self.tail = offset + len(data), (before + data)[-TAIL:]

    def begin_anew(self) -> None:
        """Starts again at the beginning after a truncation; the content gets the next name."""
        self.name = self.name._replace(copy=self.name.copy + 1)
        self.offset, self.tail = 0, b""
