"""`os.scandir` of the simulated Linux."""

from __future__ import annotations

import errno
import stat
from collections.abc import Iterator
from typing import Any

from tests.world.calls import Stat, _folder, _stat, kernel, stat_
from tests.world.disk import Inode, refuse


class Entry:
    """As os.DirEntry."""

    def __init__(self, folder: str, name: str, inode: Inode) -> None:
        self.name = name
        self.path = f"{folder.rstrip('/')}/{name}" if folder != "." else name
        self._inode = inode
        self._stat = _stat(inode)

    def inode(self) -> int:
        return self._inode.ino

    def is_symlink(self) -> bool:
        return self._inode.kind == stat.S_IFLNK

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return self._is(stat.S_IFDIR, follow_symlinks)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return self._is(stat.S_IFREG, follow_symlinks)

    def _is(self, kind: int, follow: bool) -> bool:
        if self.is_symlink() and follow:
            try:
                return stat.S_IFMT(stat_(self.path).st_mode) == kind
            except OSError:
                return False
        return self._inode.kind == kind

    def stat(self, *, follow_symlinks: bool = True) -> Stat:
        if self.is_symlink() and follow_symlinks:
            return stat_(self.path)
        if not self._inode.places:
            raise refuse(errno.ENOENT, self.path)
        kernel().step("stat", self.path)
        return _stat(self._inode)

    def __fspath__(self) -> str:
        return self.path


class Scan:
    def __init__(self, entries: list[Entry]) -> None:
        self._entries = iter(entries)

    def __enter__(self) -> Scan:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._entries = iter(())

    def __iter__(self) -> Iterator[Entry]:
        return self

    def __next__(self) -> Entry:
        return next(self._entries)


def scandir(path: Any = ".") -> Scan:
    _, named, inode = _folder(path, "scandir")
    return Scan([Entry(named, name, below) for name, below in inode.names.items()])
