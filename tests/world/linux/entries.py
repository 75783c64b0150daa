"""`os.scandir` of the simulated Linux."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from typing import Any

from tests.world.linux.calls import Stat, _folder, stat_
from tests.world.linux.inodes import Inode


class Entry:
    """As os.DirEntry: the kind is that of when it was listed, and what stat has told once is kept."""

    def __init__(self, folder: str, name: str, inode: Inode, fd: int | None) -> None:
        self.name = name
        self.path = f"{folder}{'' if folder.endswith('/') or not folder else '/'}{name}"
        self._fd = fd
        self._kind = inode.kind
        self._ino = inode.ino
        self._stats: dict[bool, Stat] = {}

    def inode(self) -> int:
        return self._ino

    def is_symlink(self) -> bool:
        return self._kind == stat.S_IFLNK

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return self._is(stat.S_IFDIR, follow_symlinks)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return self._is(stat.S_IFREG, follow_symlinks)

    def _is(self, kind: int, follow: bool) -> bool:
        if self.is_symlink() and follow:
            try:
                return stat.S_IFMT(self.stat().st_mode) == kind
            except FileNotFoundError:
                return False
        return self._kind == kind

    def stat(self, *, follow_symlinks: bool = True) -> Stat:
        follow = follow_symlinks and self.is_symlink()
        if follow not in self._stats:
            self._stats[follow] = stat_(self.path, dir_fd=self._fd, follow_symlinks=follow)
        return self._stats[follow]

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
    if isinstance(path, bytes):
        raise NotImplementedError("os.scandir of bytes is not simulated")
    path = "." if path is None else path
    _, named, inode = _folder(path, "scandir")
    fd = path if isinstance(path, int) else None
    return Scan([Entry(named, name, below, fd) for name, below in inode.names.items()])
