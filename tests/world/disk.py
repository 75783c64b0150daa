"""The simulated file system: inodes, names, open files with locks and pipes; what is durable after a power cut."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import random

    from tests.world.kernel import Channel, Kernel, Process

MAX_LINKS = 40
PIPE_BYTES = 1 << 16


def refuse(number: int, path: str | None = None) -> OSError:
    return OSError(number, os.strerror(number), path) if path is not None else OSError(number, os.strerror(number))


class Inode:
    """A file, folder, link, pipe or device."""

    def __init__(self, disk: Disk, kind: int, mode: int, uid: int) -> None:
        from tests.world.kernel import Channel

        disk.next_ino += 1
        self.ino = disk.next_ino
        self.disk = disk
        self.kind = kind
        self.mode = mode
        self.uid = uid
        self.gid = uid
        self.data = bytearray()
        self.names: dict[str, Inode] = {}
        self.places: list[tuple[Inode, str]] = []
        """Where it has names."""
        self.target = ""
        self.mtime_ns = disk.kernel.unix_ns()
        self.device = ""
        self.opened = 0
        self.locks: dict[OpenFile, int] = {}
        self.unlocked: Channel = Channel()
        self.synced: bytes | None = None
        """Of a file: what it has after a power cut for sure. None where it was never synced."""
        self.pipe: Pipe | None = None

    @property
    def is_folder(self) -> bool:
        return self.kind == stat.S_IFDIR

    def path(self) -> str:
        """By one of its names; "" for none."""
        parts: list[str] = []
        inode = self
        while inode is not self.disk.root:
            if not inode.places:
                return ""
            above, name = inode.places[0]
            parts.append(name)
            inode = above
        return "/" + "/".join(reversed(parts))


class Pipe:
    def __init__(self) -> None:
        from tests.world.kernel import Channel

        self.data = bytearray()
        self.readers = 0
        self.writers = 0
        self.changed: Channel = Channel()


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
        return self.inode.path() or f"{self.path} (deleted)"

    def read(self, size: int) -> bytes:
        """Of a file; pipes block and are read by posix.py."""
        if not self.can_read:
            raise refuse(errno.EBADF)
        data = self.pread(size, self.position)
        self.position += len(data)
        return data

    def pread(self, size: int, offset: int) -> bytes:
        if self.inode.is_folder:
            raise refuse(errno.EISDIR)
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
        at = offset
        if at is None:
            at = len(inode.data) if self.flags & os.O_APPEND else self.position
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
        if offset is None:
            self.position = at + len(data)
        self.disk.kernel.say("written", inode)
        return len(data)


class Disk:
    """One file system from `/` on, and the journal of what is not durable yet."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.next_ino = 1
        self.size = 1 << 40
        self.used = 0
        self.journal: list[tuple[Inode, str, Inode | None]] = []
        """Changes of names since the last sync: (folder, name, what is there now)."""
        self.durable: dict[int, dict[str, Inode]] = {}
        self.root = Inode(self, stat.S_IFDIR, 0o755, 0)

    def room(self) -> int:
        return max(0, self.size - self.used)

    # --- names ------------------------------------------------------------------------------------------------------

    def lookup(
        self, process: Process, path: str, *, follow: bool = True, at: Inode | None = None
    ) -> tuple[Inode, str, Inode | None]:
        """(the folder, the last name, what is there). ENOENT, ENOTDIR, ELOOP, EACCES for what lies on the way."""
        return self._walk(process, path, path, follow, at, 0)

    def _walk(
        self, process: Process, path: str, named: str, follow: bool, at: Inode | None, depth: int
    ) -> tuple[Inode, str, Inode | None]:
        if not path:
            raise refuse(errno.ENOENT, named)
        if depth > MAX_LINKS:
            raise refuse(errno.ELOOP, named)
        if path.startswith("/"):
            folder = self.root
        elif at is not None:
            folder = at
        else:
            folder = self.find(process.cwd) or self.root
        parts = [part for part in path.split("/") if part not in ("", ".")]
        if not parts:
            above, name = folder.places[0] if folder.places else (folder, "")
            return above, name, folder
        must_be_folder = path.endswith("/")
        for number, part in enumerate(parts):
            last = number == len(parts) - 1
            if not folder.is_folder:
                raise refuse(errno.ENOTDIR, named)
            if process.uid != 0 and not self.allows(process, folder, 1):
                raise refuse(errno.EACCES, named)
            if len(os.fsencode(part)) > 255:
                raise refuse(errno.ENAMETOOLONG, named)
            if part == "..":
                found: Inode | None = folder.places[0][0] if folder.places else folder
            else:
                found = folder.names.get(part)
            if last and (found is None or found.kind != stat.S_IFLNK or not (follow or must_be_folder)):
                if found is not None and must_be_folder and not found.is_folder:
                    raise refuse(errno.ENOTDIR, named)
                if part == "..":
                    assert found is not None
                    above, name = found.places[0] if found.places else (found, "")
                    return above, name, found
                return folder, part, found
            if found is None:
                raise refuse(errno.ENOENT, named)
            if found.kind == stat.S_IFLNK:
                rest = "/".join(parts[number + 1 :])
                return self._walk(
                    process, f"{found.target}/{rest}" if rest else found.target, named, follow, folder, depth + 1
                )
            folder = found
        raise AssertionError("unreachable")

    def find(self, path: str) -> Inode | None:
        """Of a path without links."""
        inode: Inode | None = self.root
        for part in path.split("/"):
            if part:
                inode = inode.names.get(part) if inode is not None else None
        return inode

    @staticmethod
    def allows(process: Process, inode: Inode, bit: int) -> bool:
        """bit: 4 to read, 2 to write, 1 to search or run."""
        if process.uid == 0:
            return bit != 1 or inode.is_folder or bool(inode.mode & 0o111)
        shift = 6 if inode.uid == process.uid else 0
        return bool((inode.mode >> shift) & bit)

    def put(self, folder: Inode, name: str, inode: Inode) -> None:
        folder.names[name] = inode
        inode.places.append((folder, name))
        folder.mtime_ns = self.kernel.unix_ns()
        self.journal.append((folder, name, inode))
        self.kernel.say("named", inode)

    def drop(self, folder: Inode, name: str) -> None:
        inode = folder.names.pop(name)
        inode.places.remove((folder, name))
        folder.mtime_ns = self.kernel.unix_ns()
        self.journal.append((folder, name, None))
        self.forget(inode)

    def forget(self, inode: Inode) -> None:
        if not inode.places and not inode.opened and inode.data:
            self.used -= len(inode.data)
            inode.data = bytearray()

    def check_writable(self, process: Process, folder: Inode, path: str, inode: Inode | None = None) -> None:
        """Whether names of the folder may be changed; `inode`: what goes."""
        if process.uid == 0:
            return
        if not self.allows(process, folder, 2) or not self.allows(process, folder, 1):
            raise refuse(errno.EACCES, path)
        if inode is not None and folder.mode & stat.S_ISVTX and process.uid not in (folder.uid, inode.uid):
            raise refuse(errno.EPERM, path)

    # --- files ------------------------------------------------------------------------------------------------------

    def make(self, process: Process, folder: Inode, name: str, kind: int, mode: int, path: str) -> Inode:
        self.check_writable(process, folder, path)
        if not folder.places and folder is not self.root:
            raise refuse(errno.ENOENT, path)
        inode = Inode(self, kind, mode & ~process.umask, process.uid)
        self.put(folder, name, inode)
        return inode

    def rename(self, process: Process, old: str, new: str, at: Inode | None, to: Inode | None) -> None:
        above, name, inode = self.lookup(process, old, follow=False, at=at)
        if inode is None:
            raise refuse(errno.ENOENT, old)
        folder, new_name, there = self.lookup(process, new, follow=False, at=to)
        self.check_writable(process, above, old, inode)
        self.check_writable(process, folder, new, there)
        if there is inode:
            return
        if there is not None:
            if there.is_folder and not inode.is_folder:
                raise refuse(errno.EISDIR, old)
            if inode.is_folder and not there.is_folder:
                raise refuse(errno.ENOTDIR, old)
            if there.names:
                raise refuse(errno.ENOTEMPTY, old)
        if inode.is_folder:
            walked: Inode = folder
            while walked is not self.root and walked.places:
                if walked is inode:
                    raise refuse(errno.EINVAL, old)
                walked = walked.places[0][0]
        if there is not None:
            del folder.names[new_name]
            there.places.remove((folder, new_name))
        del above.names[name]
        inode.places.remove((above, name))
        folder.names[new_name] = inode
        inode.places.append((folder, new_name))
        above.mtime_ns = folder.mtime_ns = self.kernel.unix_ns()
        # one transaction: after a power cut both are so, or neither
        self.journal.append((above, name, None))
        self.journal.append((folder, new_name, inode))
        if there is not None:
            self.forget(there)
        self.kernel.say("named", inode)

    # --- locks ------------------------------------------------------------------------------------------------------

    def try_lock(self, file: OpenFile, how: int) -> bool:
        inode, shared = file.inode, bool(how & fcntl.LOCK_SH)
        others = [kind for holder, kind in inode.locks.items() if holder is not file]
        if fcntl.LOCK_EX in others or (others and not shared):
            return False
        inode.locks.pop(file, None)
        inode.locks[file] = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        self.kernel.say("locked", file)
        return True

    def unlock(self, file: OpenFile) -> None:
        if file.inode.locks.pop(file, None) is not None:
            self.kernel.say("unlocked", file)
            file.inode.unlocked.notify()

    # --- a power cut ------------------------------------------------------------------------------------------------

    def sync(self, inode: Inode) -> None:
        """fsync of a file makes its content durable, of a folder all changes of names up to now (one journal)."""
        if inode.is_folder:
            self._make_durable(len(self.journal))
        else:
            inode.synced = bytes(inode.data)

    def _make_durable(self, count: int) -> None:
        for folder, name, inode in self.journal[:count]:
            names = self.durable.setdefault(folder.ino, {})
            if inode is None:
                names.pop(name, None)
            else:
                names[name] = inode
        del self.journal[:count]

    def settle(self) -> None:
        """All that is, is durable."""
        self._make_durable(len(self.journal))
        self._each(self.root, lambda inode: setattr(inode, "synced", bytes(inode.data)))

    def _each(self, inode: Inode, do: Any) -> None:
        do(inode)
        for below in inode.names.values():
            self._each(below, do)

    def lose_power(self, chance: random.Random) -> None:
        """Names are as some moment since the last sync of a folder left them; what was not synced of a file is there,
        is cut, is zeros, or was never written."""
        count = chance.randint(0, len(self.journal))
        if 0 < count < len(self.journal) and self.journal[count - 1][2] is None and self.journal[count][2] is not None:
            count += 1  # a rename is whole
        self._make_durable(count)
        self.journal = []
        self._restore(self.root, chance)
        self.used = 0
        self._each(self.root, self._count)

    def _count(self, inode: Inode) -> None:
        self.used += len(inode.data)

    def _restore(self, folder: Inode, chance: random.Random) -> None:
        folder.names = dict(self.durable.get(folder.ino, {}))
        for name, inode in folder.names.items():
            inode.places = [(folder, name)]
            if inode.is_folder:
                self._restore(inode, chance)
            elif inode.kind == stat.S_IFREG and inode.synced != inode.data:
                before = inode.synced or b""
                ways = [before, before + bytes(inode.data[len(before) :]), bytes(len(inode.data))]
                ways.append(bytes(inode.data[: chance.randint(0, len(inode.data))]))
                inode.data = bytearray(chance.choice(ways))
                inode.synced = bytes(inode.data)
