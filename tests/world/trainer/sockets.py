"""Pairs of sockets, memory that two processes share, and what Python builds on them: `multiprocessing.connection`,
`send_handle`, `mmap`, `poll` for the end of a connection."""

from __future__ import annotations

import errno
import os
import select
import stat
import struct
import types
from typing import Any

from tests.world.linux import calls
from tests.world.linux.calls import kernel, this
from tests.world.linux.channel import Channel
from tests.world.linux.inodes import Inode, OpenFile, refuse

ROOM = 1 << 18


class End(OpenFile):
    """One end of a pair of sockets."""

    other: End

    def __init__(self) -> None:
        disk = kernel().disk
        super().__init__(disk, Inode(disk, stat.S_IFSOCK, 0o600, 0), os.O_RDWR, "socket:")
        self.data = bytearray()
        self.handles: list[OpenFile] = []
        """Descriptors that are on their way."""
        self.changed = Channel()

    def release(self) -> None:
        super().release()
        if not self.users:
            for file in self.handles:
                file.release()
            self.handles.clear()
            self.changed.notify()
            self.other.changed.notify()

    @property
    def is_alone(self) -> bool:
        return not self.other.users


class Handle:
    """What socket.socketpair gives."""

    def __init__(self, end: End) -> None:
        self._fd = calls._new_fd(this(), end)

    def fileno(self) -> int:
        return self._fd

    def detach(self) -> int:
        fd, self._fd = self._fd, -1
        return fd

    def close(self) -> None:
        if self._fd >= 0:
            calls.close(self.detach())

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def socketpair() -> tuple[Handle, Handle]:
    kernel().step("socketpair")
    one, two = End(), End()
    one.other, two.other = two, one
    return Handle(one), Handle(two)


class Connection:
    """As multiprocessing.connection.Connection: the length of each message goes before it."""

    def __init__(self, handle: int) -> None:
        self._fd: int | None = handle

    @property
    def closed(self) -> bool:
        return self._fd is None

    def fileno(self) -> int:
        if self._fd is None:
            raise OSError("handle is closed")
        return self._fd

    def close(self) -> None:
        if self._fd is not None:
            fd, self._fd = self._fd, None
            calls.close(fd)

    def _end(self, name: str) -> End:
        process = kernel().step(name)
        end = process.fds.get(self.fileno())
        if not isinstance(end, End):
            raise refuse(errno.EBADF)
        return end

    def send_bytes(self, data: bytes) -> None:
        whole = struct.pack("!i", len(data)) + data
        parts = [whole] if len(data) <= 16384 else [whole[:4], whole[4:]]
        for part in parts:
            rest = memoryview(part)
            while rest:
                end = self._end("send")
                kernel().block(lambda end=end: end.is_alone or len(end.other.data) < ROOM, end.other.changed)  # type: ignore[misc]
                if end.is_alone:
                    raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
                piece = rest[: ROOM - len(end.other.data)]
                end.other.data += piece
                end.other.changed.notify()
                rest = rest[len(piece) :]

    def _receive(self, size: int) -> bytes:
        found = b""
        while len(found) < size:
            end = self._end("receive")
            kernel().block(lambda end=end: bool(end.data) or end.is_alone, end.changed)  # type: ignore[misc]
            if not end.data:
                raise EOFError
            part = bytes(end.data[: size - len(found)])
            del end.data[: len(part)]
            end.changed.notify()
            found += part
        return found

    def recv_bytes(self) -> bytes:
        (size,) = struct.unpack("!i", self._receive(4))
        return self._receive(size)

    def poll(self, timeout: float = 0.0) -> bool:
        assert timeout == 0.0
        end = self._end("poll")
        return bool(end.data) or end.is_alone


def send_handle(connection: Connection, handle: int, destination: int | None) -> None:
    end = connection._end("send")
    if end.is_alone:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
    end.other.handles.append(this().fds[handle].copy())
    end.other.changed.notify()


def recv_handle(connection: Connection) -> int:
    end = connection._end("receive")
    kernel().block(lambda: bool(end.handles) or end.is_alone, end.changed)
    if not end.handles:
        raise EOFError
    return calls._new_fd(this(), end.handles.pop(0))


class Poll:
    """As select.poll, for who wants to hear of nothing but the end of a connection."""

    def register(self, fd: int, events: int) -> None:
        assert not events & (select.POLLIN | select.POLLOUT)
        self._fd = fd

    def poll(self) -> list[tuple[int, int]]:
        process = kernel().step("poll")
        end = process.fds[self._fd]
        assert isinstance(end, End)
        kernel().block(lambda: end.is_alone, end.changed)
        return [(self._fd, select.POLLHUP)]


# --- memory -----------------------------------------------------------------------------------------------------------


def memfd_create(name: str, flags: int = 0) -> int:
    process = kernel().step("memfd_create")
    disk = kernel().disk
    return calls._new_fd(process, OpenFile(disk, Inode(disk, stat.S_IFREG, 0o600, 0), os.O_RDWR, f"/memfd:{name}"))


class Mapped:
    """As mmap.mmap: the memory itself, which every process sees that has mapped it."""

    def __init__(self, descriptor: int, size: int) -> None:
        inode: Any = kernel().step("mmap").fds[descriptor].inode
        if not hasattr(inode, "mapped"):
            inode.mapped, inode.data = inode.data, bytearray()  # no disk holds it
            kernel().disk.used -= len(inode.mapped)
        self.memory: bytearray = inode.mapped
        assert len(self.memory) >= size

    def madvise(self, advice: int) -> None:
        pass


MMAP = types.ModuleType("mmap")
MMAP.__dict__.update(mmap=Mapped, PAGESIZE=4096, MADV_HUGEPAGE=14)
SOCKET = types.ModuleType("socket")
SOCKET.__dict__.update(socketpair=socketpair, gethostname=lambda: this().host)
