"""A log as the file that it is, whatever name it goes by: found again after a rename, a removal, a cut.

A rank's wrapper notes the file that it has opened. A reader knows a log by that, by how far it has read, and by the
last bytes before that place; with these a client finds it again over another connection.
Stdlib only, Python 3.8, Linux.
"""

import os
import stat
from typing import Literal, NamedTuple, Optional

from ..host.layout import Job, LogName
from ..host.typed import InvalidData, read_typed

TAIL = 16
"""So many bytes before a place tell whether it is still the same one."""


class Change(NamedTuple):
    """What became of a log that is read. `file`: by LogName, where reading goes on."""

    file: str
    what: Literal["renamed", "removed", "replaced", "cut", "gone"]
    to: str = ""
    """Its new name."""


class LogMark(NamedTuple):
    """Which file it is, and the last bytes that were read of it."""

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
    """Of a rank's record, what tells where its output goes."""

    pid: int = 0
    log_inode: int = 0


class LogLocation(NamedTuple):
    """Where a log lies now. `change`: why not where it was."""

    path: str
    change: Optional[Change] = None


def named_path(job: Job, name: LogName) -> str:
    return os.path.join(job.logs(name.attempt, name.group.folder), name.file)


def inode_of(path: str) -> int:
    """0 for what is no regular file."""
    try:
        found = os.stat(path)
    except OSError:
        return 0
    return found.st_ino if stat.S_ISREG(found.st_mode) else 0


def find_log(job: Job, name: LogName, inode: int = 0) -> Optional[LogLocation]:
    """The log's place: by its name, else under another one beside it, else through the process that writes it. None
    when it is gone. `inode`: the file that it is; unless given, the one that the rank's wrapper noted."""
    path = named_path(job, name)
    here = inode_of(path)
    record = _rank_log(job, name)
    wanted = inode or (record.log_inode if name.copy == 1 else 0)
    if here and wanted in (0, here):
        return LogLocation(path)
    moved = _moved(job, name, wanted, record.pid) if wanted else None
    if moved is not None:
        return moved
    # a file system may number its files anew; only the bytes tell then
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
    """Whether a file goes at least up to that place, and these bytes come just before it."""
    tail = tail[-offset:] if offset else b""
    return os.fstat(fd).st_size >= offset and os.pread(fd, len(tail), offset - len(tail)) == tail


class Stream:
    """One file that is read on, under the name by which a client knows it."""

    def __init__(self, name: LogName, fd: int, offset: int, tail: Optional[bytes] = None) -> None:
        """`tail`: what a client has seen before `offset`; unless given, what stands there."""
        self.name = name
        self.fd = fd
        self.inode = os.fstat(fd).st_ino
        self.offset = offset
        self.tail = os.pread(fd, min(TAIL, offset), max(0, offset - TAIL)) if tail is None else tail
        self.moved = False
        """It has been told that it is no longer where it was made."""

    @property
    def mark(self) -> LogMark:
        return LogMark(self.inode, self.tail)

    def read(self, size: int, first_kept: int) -> Optional[bytes]:
        """What follows, at most `size` bytes; None when this is no longer what was read before: it was cut. Before
        `first_kept` nothing is as it was."""
        there = os.fstat(self.fd).st_size
        if there <= self.offset:
            return b"" if there == self.offset else None
        back = min(len(self.tail), self.offset)
        data = os.pread(self.fd, back + size, self.offset - back)
        if self.offset - back >= first_kept and data[:back] != self.tail[len(self.tail) - back :]:
            return None
        return data[back:]

    def go_on(self, offset: int, data: bytes) -> None:
        """These bytes, from that place on, have been read."""
        before = self.tail if offset == self.offset else b""
        self.offset, self.tail = offset + len(data), (before + data)[-TAIL:]

    def begin_anew(self) -> None:
        """It was cut: what it holds now is told under the next name."""
        self.name = self.name._replace(copy=self.name.copy + 1)
        self.offset, self.tail = 0, b""
