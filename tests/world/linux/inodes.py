"""What lies on the simulated disk, and what is open of it: inodes, names, open files with locks, pipes."""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING, NamedTuple

from tests.world.linux.channel import Channel

if TYPE_CHECKING:
    from tests.world.linux.disk import Disk

PIPE_BYTES, PIPE_BUF = 1 << 16, 4096


def refuse(number: int, path: str | None = None) -> OSError:
    return OSError(number, os.strerror(number), path) if path is not None else OSError(number, os.strerror(number))


class Found(NamedTuple):
    """Where a path leads."""

    folder: Inode
    name: str
    """The last one; also `.`, `..` and `/`, which name nothing in the folder."""
    inode: Inode | None
    has_slash: bool

    @property
    def is_name(self) -> bool:
        return self.name not in (".", "..", "/")


class Inode:
    """A file, folder, link, pipe or device."""

    def __init__(self, disk: Disk, kind: int, mode: int, uid: int) -> None:
        disk.next_ino += 1
        self.ino = disk.next_ino
        self.disk = disk
        self.kind = kind
        self.mode = mode
        self.uid = uid
        self.gid = uid
        self.data = bytearray()
        self.names: dict[str, Inode] = {}
        self.places: list[Place] = []
        """Its names."""
        self.place: Place | None = None
        """Its latest name; a folder has one."""
        self.target = ""
        self.mtime_ns = disk.kernel.unix_ns()
        self.written_ns = 0
        """When it was last written into, by the clock that never jumps."""
        self.device = ""
        self.opened = 0
        self.locks: dict[OpenFile, int] = {}
        self.unlocked: Channel = Channel()
        self.synced: bytes | None = None
        """Of a file: what it has after a power cut for sure. None where it was never synced."""
        self.pipe: Pipe | None = None
        self.is_forgotten = False
        """Neither a name nor anybody who has it open is left."""

    def path(self) -> str:
        """By its latest name; "" for none."""
        return self.place.path() if self.place is not None else ""

    @property
    def is_folder(self) -> bool:
        return self.kind == stat.S_IFDIR

    @property
    def above(self) -> Inode:
        """Of a folder: where `..` leads, also when it has no name any more."""
        return self.place.folder if self.place is not None else self


class Place:
    """A name of an inode: it moves when the name is renamed, and whoever has opened the file by it still knows it."""

    __slots__ = ("folder", "is_gone", "name")

    def __init__(self, folder: Inode, name: str) -> None:
        self.folder = folder
        self.name = name
        self.is_gone = False

    def path(self) -> str:
        above = self.folder.place
        return f"{above.path() if above is not None else ''}/{self.name}"


class Pipe:
    def __init__(self) -> None:
        self.data = bytearray()
        self.readers = 0
        self.writers = 0
        self.changed: Channel = Channel()

    @property
    def room(self) -> int:
        return PIPE_BYTES - len(self.data)


class OpenFile:
    """An open file, shared by all descriptors that were copied of it."""

    def __init__(self, disk: Disk, inode: Inode, flags: int, path: str) -> None:
        self.disk = disk
        self.inode = inode
        self.flags = flags
        self.path = path
        self.position = 0
        self.users = 1
        self.content: bytes | None = None
        """Of what /proc tells: as it was when it was opened."""
        self.place = inode.place
        inode.opened += 1

    def copy(self) -> OpenFile:
        self.users += 1
        return self

    def release(self) -> None:
        self.users -= 1
        if self.users:
            return
        inode = self.inode
        inode.opened -= 1
        if inode.locks.pop(self, None) is not None:
            self.disk.kernel.say("unlocked", self)
            inode.unlocked.notify()
        if inode.pipe is not None:
            if self.can_write:
                inode.pipe.writers -= 1
            else:
                inode.pipe.readers -= 1
            inode.pipe.changed.notify()
        self.disk.forget(inode)

    @property
    def can_write(self) -> bool:
        return self.flags & os.O_ACCMODE != os.O_RDONLY

    @property
    def can_read(self) -> bool:
        return self.flags & os.O_ACCMODE != os.O_WRONLY

    def where(self) -> str:
        """As /proc/PID/fd has it."""
        if self.inode.pipe is not None:
            return f"pipe:[{self.inode.ino}]"
        if self.inode.device or self.content is not None:
            return self.path
        if self.place is None:
            return "/"
        return self.place.path() + (" (deleted)" if self.place.is_gone else "")

    def read(self, size: int) -> bytes:
        """Of a file; pipes block and are read by calls.py."""
        data = self.pread(size, self.position)
        self.position += len(data)
        return data

    def pread(self, size: int, offset: int) -> bytes:
        if not self.can_read:
            raise refuse(errno.EBADF)
        if self.inode.is_folder:
            raise refuse(errno.EISDIR)
        if offset < 0:
            raise refuse(errno.EINVAL)
        if self.content is not None:
            return self.content[offset : offset + size]
        return bytes(self.inode.data[offset : offset + size])

    def write(self, data: bytes, offset: int | None = None) -> int:
        """How much of it there was room for; OSError for none."""
        inode = self.inode
        if not self.can_write:
            raise refuse(errno.EBADF)
        if inode.device:
            if inode.device == "full":
                raise refuse(errno.ENOSPC)
            return len(data)
        if inode.pipe is not None:
            inode.pipe.data += data
            inode.pipe.changed.notify()
            return len(data)
        if not data:
            return 0
        at = self.position if offset is None else offset
        if self.flags & os.O_APPEND:
            at = len(inode.data)  # so does Linux, even where an offset is given
        room = self.disk.room()
        grows = max(0, at + len(data) - len(inode.data))
        if grows > room:
            kept = len(data) - (grows - room)
            if kept <= 0 and data:
                raise refuse(errno.ENOSPC)
            data = data[:kept]
        if at > len(inode.data):
            inode.data += bytes(at - len(inode.data))
        before = len(inode.data)
        inode.data[at : at + len(data)] = data
        self.disk.used += len(inode.data) - before
        inode.mtime_ns = self.disk.kernel.unix_ns()
        inode.written_ns = self.disk.kernel.now_ns
        if offset is None:
            self.position = at + len(data)
        self.disk.kernel.say("written", inode)
        return len(data)
