"""The simulated file system: names, links, rights, room, and what is durable after a power cut."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from typing import TYPE_CHECKING, Any

from tests.world.linux.inodes import Found, Inode, OpenFile, Place, refuse

if TYPE_CHECKING:
    import random

    from tests.world.linux.kernel import Kernel, Process

MAX_LINKS = 40
WRITTEN_BACK_NS = 60_000_000_000
"""After so long what nobody synced is durable too."""


class Disk:
    """One file system from `/` on, and the journal of what is not durable yet."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.next_ino = 1
        self.size = 1 << 40
        self.used = 0
        self.sync_s = 0.0
        """How long it takes for what was written to be durable."""
        self.journal: list[tuple[Inode, str, Inode | None]] = []
        """Changes of names since the last sync: (folder, name, what is there now)."""
        self.durable: dict[int, dict[str, Inode]] = {}
        self.root = Inode(self, stat.S_IFDIR, 0o755, 0)

    def room(self) -> int:
        return max(0, self.size - self.used)

    # --- names ------------------------------------------------------------------------------------------------------

    def lookup(self, process: Process, path: str, *, follow: bool = True, at: Inode | None = None) -> Found:
        """Where a path leads. ENOENT, ENOTDIR, ELOOP, EACCES for what lies on the way."""
        found = self.walk(process, path, at, follow or path.endswith("/"))
        if found.has_slash and found.inode is not None and not found.inode.is_folder:
            raise refuse(errno.ENOTDIR, path)
        return found

    def walk(self, process: Process, path: str, at: Inode | None, follow: bool) -> Found:
        """The same for who makes or takes away a name: the last one is looked up, and no more."""
        if not path:
            raise refuse(errno.ENOENT, path)
        if len(path) > 1000 and len(os.fsencode(path)) >= 4096:
            raise refuse(errno.ENAMETOOLONG, path)
        if process.uid == 0 and path[0] == "/" and path[-1] != "/" and len(path) < 64:
            quick = self._straight(path, follow)
            if quick is not None:
                return quick
        folder = self.root if path.startswith("/") else at or self.find(process.cwd) or self.root
        has_slash = path.endswith("/")
        parts = [part for part in reversed(path.split("/")) if part]
        links = 0
        while parts:
            part = parts.pop()
            if not folder.is_folder:
                raise refuse(errno.ENOTDIR, path)
            if process.uid != 0 and not self.allows(process, folder, 1):
                raise refuse(errno.EACCES, path)
            if part in (".", ".."):
                found: Inode | None = folder if part == "." else folder.above
            elif len(part) > 63 and len(os.fsencode(part)) > 255:
                raise refuse(errno.ENAMETOOLONG, path)
            else:
                found = folder.names.get(part)
            if found is not None and found.kind == stat.S_IFLNK and (parts or follow):
                links += 1
                if links > MAX_LINKS:
                    raise refuse(errno.ELOOP, path)
                has_slash = has_slash or (not parts and found.target.endswith("/"))
                parts += [part for part in reversed(found.target.split("/")) if part]
                if found.target.startswith("/"):
                    folder = self.root
            elif not parts:
                return Found(folder, part, found, has_slash)
            elif found is None:
                raise refuse(errno.ENOENT, path)
            else:
                folder = found
        return Found(self.root, "/", self.root, False)

    def _straight(self, path: str, follow: bool) -> Found | None:
        """The same for most paths: nothing but names of folders, without a link."""
        *parts, name = path.split("/")
        folder = self.root
        for part in parts:
            if part:
                below = folder.names.get(part)
                if below is None or below.kind != stat.S_IFDIR:
                    return None
                folder = below
        found = folder.names.get(name)
        if name in (".", "..") or (found is not None and follow and found.kind == stat.S_IFLNK):
            return None
        return Found(folder, name, found, False)

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
        self._name(folder, name, inode)
        folder.mtime_ns = self.kernel.unix_ns()
        self.journal.append((folder, name, inode))
        self.kernel.say("named", inode)

    @staticmethod
    def _name(folder: Inode, name: str, inode: Inode) -> None:
        folder.names[name] = inode
        inode.place = Place(folder, name)
        inode.places.append(inode.place)

    @staticmethod
    def place_of(folder: Inode, name: str) -> Place:
        return next(place for place in folder.names[name].places if place.folder is folder and place.name == name)

    def _unname(self, folder: Inode, name: str) -> Inode:
        place = self.place_of(folder, name)
        place.is_gone = True
        inode = folder.names.pop(name)
        inode.places.remove(place)
        return inode

    def drop(self, folder: Inode, name: str) -> None:
        inode = self._unname(folder, name)
        folder.mtime_ns = self.kernel.unix_ns()
        self.journal.append((folder, name, None))
        self.forget(inode)

    def forget(self, inode: Inode) -> None:
        """Its room is free; a power cut may bring its name back, and with it what it held."""
        if not inode.places and not inode.opened and not inode.is_forgotten:
            self.used -= len(inode.data)
            inode.is_forgotten = True

    def check_writable(self, process: Process, folder: Inode, path: str, inode: Inode | None = None) -> None:
        """Whether names of the folder may be changed; `inode`: what goes."""
        if process.uid == 0:
            return
        if not self.allows(process, folder, 2) or not self.allows(process, folder, 1):
            raise refuse(errno.EACCES, path)
        if inode is not None and folder.mode & stat.S_ISVTX and process.uid not in (folder.uid, inode.uid):
            raise refuse(errno.EPERM, path)

    # --- files ------------------------------------------------------------------------------------------------------

    def place_for(self, process: Process, path: str, at: Inode | None, *, folder: bool = False) -> Found:
        """Where a new name goes."""
        found = self.walk(process, path, at, False)
        if found.inode is not None:
            raise refuse(errno.EEXIST, path)
        if found.has_slash and not folder:
            raise refuse(errno.ENOENT, path)
        return found

    def make(self, process: Process, found: Found, kind: int, mode: int, path: str) -> Inode:
        self.check_named(found.folder, path)
        self.check_writable(process, found.folder, path)
        inode = Inode(self, kind, mode if kind == stat.S_IFLNK else mode & ~process.umask, process.uid)
        self.put(found.folder, found.name, inode)
        return inode

    def check_named(self, folder: Inode, path: str) -> None:
        """A folder that was taken away gets no new names."""
        if not folder.places and folder is not self.root:
            raise refuse(errno.ENOENT, path)

    def rename(self, process: Process, old: str, new: str, at: Inode | None, to: Inode | None) -> None:
        source, target = self.walk(process, old, at, False), self.walk(process, new, to, False)
        inode, there = source.inode, target.inode
        if not source.is_name or not target.is_name:
            raise refuse(errno.EBUSY)
        if inode is None:
            raise refuse(errno.ENOENT)
        if not inode.is_folder and (source.has_slash or target.has_slash):
            raise refuse(errno.ENOTDIR)
        if inode in self._way_to(target.folder):
            raise refuse(errno.EINVAL)
        if there in self._way_to(source.folder):
            raise refuse(errno.ENOTEMPTY)
        if there is inode:
            return
        self.check_named(target.folder, new)
        self.check_writable(process, source.folder, old, inode)
        self.check_writable(process, target.folder, new, there)
        if there is not None:
            if there.is_folder and not inode.is_folder:
                raise refuse(errno.EISDIR)
            if inode.is_folder and not there.is_folder:
                raise refuse(errno.ENOTDIR)
            if there.names:
                raise refuse(errno.ENOTEMPTY)
            self._unname(target.folder, target.name)
        place = self.place_of(source.folder, source.name)
        del source.folder.names[source.name]
        target.folder.names[target.name] = inode
        place.folder, place.name = target.folder, target.name
        source.folder.mtime_ns = target.folder.mtime_ns = self.kernel.unix_ns()
        # one transaction: after a power cut both are so, or neither
        self.journal.append((source.folder, source.name, None))
        self.journal.append((target.folder, target.name, inode))
        if there is not None:
            self.forget(there)
        self.kernel.say("named", inode)

    def _way_to(self, folder: Inode) -> list[Inode]:
        """The folder and those above it."""
        way = [folder]
        while folder.above is not folder:
            folder = folder.above
            way.append(folder)
        return way

    # --- locks ------------------------------------------------------------------------------------------------------

    def try_lock(self, file: OpenFile, how: int) -> bool:
        inode, kind = file.inode, fcntl.LOCK_SH if how & fcntl.LOCK_SH else fcntl.LOCK_EX
        if inode.locks.get(file) == kind:
            return True
        self.unlock(file)  # so does Linux: who asks for another kind in vain has none
        if inode.locks and (kind == fcntl.LOCK_EX or fcntl.LOCK_EX in inode.locks.values()):
            return False
        inode.locks[file] = kind
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

    def damage(self, inode: Inode, data: bytes) -> None:
        """Of the medium: no power cut brings back what was there."""
        inode.data = bytearray(data)
        if inode.synced is not None:
            inode.synced = data

    def damage_name(self, folder: Inode, name: str) -> None:
        """It is gone from the medium too."""
        self.drop(folder, name)
        self.durable.get(folder.ino, {}).pop(name, None)
        self.journal = [entry for entry in self.journal if entry[:2] != (folder, name)]

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
        self._restore(self.root, chance, set())
        self.used = 0
        self._each(self.root, self._count)

    def _count(self, inode: Inode) -> None:
        self.used += len(inode.data)

    def _restore(self, folder: Inode, chance: random.Random, there: set[int]) -> None:
        folder.names = dict(self.durable.get(folder.ino, {}))
        for name, inode in folder.names.items():
            inode.place = Place(folder, name)
            inode.places = [*(inode.places if inode.ino in there else []), inode.place]
            there.add(inode.ino)
            inode.is_forgotten = False
            if inode.is_folder:
                self._restore(inode, chance, there)
            elif self.kernel.now_ns - inode.written_ns > WRITTEN_BACK_NS:
                inode.synced = bytes(inode.data)
            elif inode.kind == stat.S_IFREG and inode.synced != inode.data:
                before = inode.synced or b""
                ways = [before, before + bytes(inode.data[len(before) :]), bytes(len(inode.data))]
                ways.append(bytes(inode.data[: chance.randint(0, len(inode.data))]))
                inode.data = bytearray(chance.choice(ways))
                inode.synced = bytes(inode.data)
