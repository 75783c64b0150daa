"""Calls of the simulated Linux about what files have beside their content: modes, owners, times, room."""

from __future__ import annotations

import errno
from typing import Any, NamedTuple

from tests.world.linux.calls import _at_path, _file, _text, kernel, this
from tests.world.linux.inodes import Inode, refuse


class StatVfs(NamedTuple):
    f_bavail: int
    f_blocks: int
    f_frsize: int = 4096
    f_bsize: int = 4096
    f_files: int = 1 << 20
    f_favail: int = 1 << 19
    f_ffree: int = 1 << 19
    f_bfree: int = 1 << 28
    f_flag: int = 0


def chmod(path: Any, mode: int, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> None:
    _chmod(_at_path("chmod", path, dir_fd), mode)


def fchmod(fd: int, mode: int) -> None:
    _chmod(_file(kernel().step("fchmod"), fd).inode, mode)


def _chmod(inode: Inode, mode: int) -> None:
    if this().uid not in (0, inode.uid):
        raise refuse(errno.EPERM)
    inode.mode = mode


def fchown(fd: int, uid: int, gid: int) -> None:
    process = kernel().step("fchown")
    if process.uid != 0:
        raise refuse(errno.EPERM)
    inode = _file(process, fd).inode
    inode.uid, inode.gid = uid, gid


def utime(path: Any, times: Any = None, *, ns: tuple[int, int] | None = None, **_: Any) -> None:
    try:
        inode = _file(kernel().step("utime"), path).inode if isinstance(path, int) else _at_path("utime", path)
    except OSError as refused:
        raise refuse(refused.errno or 0) from None  # Python names no file here
    inode.mtime_ns = ns[1] if ns is not None else kernel().unix_ns() if times is None else int(times[1] * 1e9)


def access(path: Any, mode: int, **_: Any) -> bool:
    path = _text(path)
    process = kernel().step("access", path)
    try:
        inode = kernel().disk.lookup(process, path)[2]
    except OSError:
        return False
    return inode is not None and all(kernel().disk.allows(process, inode, bit) for bit in (4, 2, 1) if mode & bit)


def statvfs(path: Any) -> StatVfs:
    if isinstance(path, str):
        _at_path("statvfs", path)
    disk = kernel().disk
    return StatVfs(disk.room() >> 12, disk.size >> 12)


def getxattr(path: Any, name: Any, **_: Any) -> bytes:
    raise refuse(errno.EOPNOTSUPP, _text(path))
