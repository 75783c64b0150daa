"""The calls of the simulated Linux, as Python's `os` names them: each is one step of the process that makes it."""

from __future__ import annotations

import errno
import os
import signal
import stat
from typing import Any, NamedTuple

from tests.world.disk import PIPE_BYTES, Inode, OpenFile, Pipe, refuse
from tests.world.kernel import Kernel, Killed, Process
from tests.world.proc import open_proc, read_proc_link, stat_of_proc

DEVICE = 0x801


class Here:
    """The world that is under way; one at a time."""

    kernel: Kernel


def kernel() -> Kernel:
    return Here.kernel


def this() -> Process:
    """Whoever asks, without a step."""
    thread = Here.kernel.current
    assert thread is not None
    if thread.process.is_over:
        raise Killed
    return thread.process


class Stat(NamedTuple):
    st_mode: int
    st_ino: int
    st_dev: int
    st_nlink: int
    st_uid: int
    st_gid: int
    st_size: int
    st_mtime_ns: int

    @property
    def st_mtime(self) -> float:
        return self.st_mtime_ns / 1e9

    st_ctime = st_atime = st_mtime
    st_blocks = property(lambda self: (self.st_size + 511) // 512)


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


def _text(path: Any) -> str:
    return path if type(path) is str else os.fsdecode(path)


def _at(process: Process, dir_fd: int | None) -> Inode | None:
    return None if dir_fd is None else _file(process, dir_fd).inode


def _file(process: Process, fd: int) -> OpenFile:
    file = process.fds.get(fd)
    if file is None:
        raise refuse(errno.EBADF)
    return file


def _stat(inode: Inode) -> Stat:
    size = len(inode.target) if inode.kind == stat.S_IFLNK else len(inode.data)
    return Stat(
        inode.kind | inode.mode,
        inode.ino,
        DEVICE,
        max(1, len(inode.places)) if inode.places or inode.is_folder else 0,
        inode.uid,
        inode.gid,
        size,
        inode.mtime_ns,
    )


# --- names ------------------------------------------------------------------------------------------------------------


def stat_(path: Any, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> Stat:
    if isinstance(path, int):
        return fstat(path)
    path = _text(path)
    process = kernel().step("stat", path)
    if path.startswith("/proc"):
        return stat_of_proc(kernel(), process, path, _stat, follow_symlinks)
    inode = kernel().disk.lookup(process, path, follow=follow_symlinks, at=_at(process, dir_fd))[2]
    if inode is None:
        raise refuse(errno.ENOENT, path)
    return _stat(inode)


def lstat(path: Any, *, dir_fd: int | None = None) -> Stat:
    return stat_(path, dir_fd=dir_fd, follow_symlinks=False)


def fstat(fd: int) -> Stat:
    return _stat(_file(kernel().step("fstat"), fd).inode)


def open_(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
    path = _text(path)
    process = kernel().step("open", path)
    if path.startswith("/proc/"):
        return _new_fd(process, open_proc(kernel(), process, path, flags))
    disk = kernel().disk
    folder, name, inode = disk.lookup(process, path, follow=not flags & os.O_NOFOLLOW, at=_at(process, dir_fd))
    writes = flags & os.O_ACCMODE != os.O_RDONLY
    if inode is None:
        if not flags & os.O_CREAT:
            raise refuse(errno.ENOENT, path)
        inode = disk.make(process, folder, name, stat.S_IFREG, mode, path)
    else:
        if flags & os.O_CREAT and flags & os.O_EXCL:
            raise refuse(errno.EEXIST, path)
        if inode.kind == stat.S_IFLNK:
            raise refuse(errno.ELOOP, path)
        if flags & os.O_DIRECTORY and not inode.is_folder:
            raise refuse(errno.ENOTDIR, path)
        if inode.is_folder and (writes or flags & os.O_CREAT):
            raise refuse(errno.EISDIR, path)
        wanted = 4 * (flags & os.O_ACCMODE != os.O_WRONLY) | 2 * writes
        if any(bit & wanted and not disk.allows(process, inode, bit) for bit in (4, 2)):
            raise refuse(errno.EACCES, path)
    file = OpenFile(disk, inode, flags, path if path.startswith("/") else f"{process.cwd}/{path}")
    if flags & os.O_TRUNC and writes and inode.kind == stat.S_IFREG:
        _resize(inode, 0)
    return _new_fd(process, file)


def _new_fd(process: Process, file: OpenFile, lowest: int = 0) -> int:
    fd = lowest
    while fd in process.fds:
        fd += 1
    process.fds[fd] = file
    process.inheritable.discard(fd)
    return fd


def _resize(inode: Inode, size: int) -> None:
    disk = kernel().disk
    before = len(inode.data)
    if size < before:
        del inode.data[size:]
    else:
        inode.data += bytes(size - before)
    disk.used += size - before
    inode.mtime_ns = kernel().unix_ns()
    kernel().say("written", inode)


def mkdir(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
    path = _text(path)
    process = kernel().step("mkdir", path)
    folder, name, inode = kernel().disk.lookup(process, path.rstrip("/") or "/", follow=False, at=_at(process, dir_fd))
    if inode is not None:
        raise refuse(errno.EEXIST, path)
    kernel().disk.make(process, folder, name, stat.S_IFDIR, mode, path)


def rmdir(path: Any, *, dir_fd: int | None = None) -> None:
    path = _text(path)
    process = kernel().step("rmdir", path)
    folder, name, inode = kernel().disk.lookup(process, path, follow=False, at=_at(process, dir_fd))
    if inode is None:
        raise refuse(errno.ENOENT, path)
    if not inode.is_folder:
        raise refuse(errno.ENOTDIR, path)
    kernel().disk.check_writable(process, folder, path, inode)
    if inode.names:
        raise refuse(errno.ENOTEMPTY, path)
    kernel().disk.drop(folder, name)


def unlink(path: Any, *, dir_fd: int | None = None) -> None:
    path = _text(path)
    process = kernel().step("unlink", path)
    folder, name, inode = kernel().disk.lookup(process, path, follow=False, at=_at(process, dir_fd))
    if inode is None:
        raise refuse(errno.ENOENT, path)
    if inode.is_folder:
        raise refuse(errno.EISDIR, path)
    kernel().disk.check_writable(process, folder, path, inode)
    kernel().disk.drop(folder, name)


def rename(old: Any, new: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
    old, new = _text(old), _text(new)
    process = kernel().step("rename", new)
    kernel().disk.rename(process, old, new, _at(process, src_dir_fd), _at(process, dst_dir_fd))


def symlink(target: Any, path: Any, target_is_directory: bool = False, *, dir_fd: int | None = None) -> None:
    path = _text(path)
    process = kernel().step("symlink", path)
    folder, name, inode = kernel().disk.lookup(process, path, follow=False, at=_at(process, dir_fd))
    if inode is not None:
        raise refuse(errno.EEXIST, path)
    kernel().disk.make(process, folder, name, stat.S_IFLNK, 0o777, path).target = _text(target)


def link(
    source: Any,
    path: Any,
    *,
    src_dir_fd: int | None = None,
    dst_dir_fd: int | None = None,
    follow_symlinks: bool = True,
) -> None:
    source, path = _text(source), _text(path)
    process = kernel().step("link", path)
    if source.startswith("/proc/self/fd/"):
        inode: Inode | None = _file(process, int(source.rsplit("/", 1)[1])).inode
        if inode is not None and not inode.places:
            raise refuse(errno.ENOENT, source)
    else:
        inode = kernel().disk.lookup(process, source, follow=follow_symlinks, at=_at(process, src_dir_fd))[2]
    folder, name, there = kernel().disk.lookup(process, path, follow=False, at=_at(process, dst_dir_fd))
    if inode is None:
        raise refuse(errno.ENOENT, source)
    if there is not None:
        raise refuse(errno.EEXIST, path)
    kernel().disk.check_writable(process, folder, path)
    kernel().disk.put(folder, name, inode)


def readlink(path: Any, *, dir_fd: int | None = None) -> str:
    path = _text(path)
    process = kernel().step("readlink", path)
    if path.startswith("/proc/"):
        return read_proc_link(kernel(), process, path)
    inode = kernel().disk.lookup(process, path, follow=False, at=_at(process, dir_fd))[2]
    if inode is None:
        raise refuse(errno.ENOENT, path)
    if inode.kind != stat.S_IFLNK:
        raise refuse(errno.EINVAL, path)
    return inode.target


def _folder(path: Any, name: str) -> tuple[Process, str, Inode]:
    process = kernel().step(name, path if isinstance(path, str) else "")
    if isinstance(path, int):
        inode: Inode | None = _file(process, path).inode
        path = ""
    else:
        path = _text(path)
        inode = kernel().disk.lookup(process, path)[2]
    if inode is None:
        raise refuse(errno.ENOENT, path)
    if not inode.is_folder:
        raise refuse(errno.ENOTDIR, path)
    if not kernel().disk.allows(process, inode, 4):
        raise refuse(errno.EACCES, path)
    return process, path, inode


def listdir(path: Any = ".") -> list[str]:
    if isinstance(path, str) and path.startswith("/proc"):
        process = kernel().step("listdir", path)
        names = open_proc(kernel(), process, path, os.O_DIRECTORY).content
        assert names is not None
        return names.decode().split()
    return list(_folder(path, "listdir")[2].names)


def chmod(path: Any, mode: int, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> None:
    _chmod(_at_path("chmod", path, dir_fd), mode)


def fchmod(fd: int, mode: int) -> None:
    _chmod(_file(kernel().step("fchmod"), fd).inode, mode)


def _at_path(name: str, path: Any, dir_fd: int | None = None) -> Inode:
    path = _text(path)
    process = kernel().step(name, path)
    inode = kernel().disk.lookup(process, path, at=_at(process, dir_fd))[2]
    if inode is None:
        raise refuse(errno.ENOENT, path)
    return inode


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
    inode = _file(kernel().step("utime"), path).inode if isinstance(path, int) else _at_path("utime", path)
    inode.mtime_ns = ns[1] if ns is not None else kernel().unix_ns() if times is None else int(times[1] * 1e9)


def access(path: Any, mode: int, **_: Any) -> bool:
    path = _text(path)
    process = kernel().step("access", path)
    try:
        inode = kernel().disk.lookup(process, path)[2]
    except OSError:
        return False
    return inode is not None and all(kernel().disk.allows(process, inode, bit) for bit in (4, 2, 1) if mode & bit)


def truncate(path: Any, length: int) -> None:
    inode = _file(kernel().step("truncate"), path).inode if isinstance(path, int) else _at_path("truncate", path)
    if length - len(inode.data) > kernel().disk.room():
        raise refuse(errno.ENOSPC)
    _resize(inode, length)


def statvfs(path: Any) -> StatVfs:
    if isinstance(path, str):
        _at_path("statvfs", path)
    disk = kernel().disk
    return StatVfs(disk.room() >> 12, disk.size >> 12)


def getcwd() -> str:
    return this().cwd


def umask(mask: int) -> int:
    process = this()
    before, process.umask = process.umask, mask
    return before


# --- open files -------------------------------------------------------------------------------------------------------


def close(fd: int) -> None:
    process = kernel().step("close")
    file = process.fds.pop(fd, None)
    if file is None:
        raise refuse(errno.EBADF)
    process.inheritable.discard(fd)
    file.release()


def read(fd: int, size: int) -> bytes:
    file = _file(kernel().step("read"), fd)
    pipe = file.inode.pipe
    if pipe is None:
        return file.read(size)
    if not pipe.data and pipe.writers:
        if file.flags & os.O_NONBLOCK:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        kernel().block(lambda: bool(pipe.data) or not pipe.writers, pipe.changed)
    data = bytes(pipe.data[:size])
    del pipe.data[:size]
    pipe.changed.notify()
    return data


def write(fd: int, data: Any) -> int:
    process = kernel().step("write")
    file = _file(process, fd)
    pipe = file.inode.pipe
    if pipe is None:
        return file.write(bytes(data))
    if pipe.readers and len(pipe.data) >= PIPE_BYTES:
        if file.flags & os.O_NONBLOCK:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        kernel().block(lambda: len(pipe.data) < PIPE_BYTES or not pipe.readers, pipe.changed)
    if not pipe.readers:
        kernel().signal(process, signal.SIGPIPE)
        this()
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
    return file.write(bytes(data[: PIPE_BYTES - len(pipe.data)]))


def pread(fd: int, size: int, offset: int) -> bytes:
    return _file(kernel().step("pread"), fd).pread(size, offset)


def pwrite(fd: int, data: Any, offset: int) -> int:
    return _file(kernel().step("pwrite"), fd).write(bytes(data), offset)


def lseek(fd: int, position: int, how: int) -> int:
    file = _file(kernel().step("lseek"), fd)
    if file.inode.pipe is not None:
        raise refuse(errno.ESPIPE)
    length = len(file.inode.data if file.content is None else file.content)
    if how == getattr(os, "SEEK_DATA", -1):
        if position >= length:
            raise refuse(errno.ENXIO)
        base = 0
    else:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: file.position, os.SEEK_END: length}[how]
    if base + position < 0:
        raise refuse(errno.EINVAL)
    file.position = base + position
    return file.position


def ftruncate(fd: int, length: int) -> None:
    truncate(fd, length)


def fsync(fd: int) -> None:
    file = _file(kernel().step("fsync"), fd)
    kernel().disk.sync(file.inode)


def dup(fd: int) -> int:
    process = kernel().step("dup")
    return _new_fd(process, _file(process, fd).copy())


def dup2(fd: int, other: int, inheritable: bool = True) -> int:
    process = kernel().step("dup2")
    file = _file(process, fd).copy()
    former = process.fds.pop(other, None)
    if former is not None:
        former.release()
    process.fds[other] = file
    (process.inheritable.add if inheritable else process.inheritable.discard)(other)
    return other


def pipe() -> tuple[int, int]:
    process = kernel().step("pipe")
    return tuple(_new_fd(process, end) for end in new_pipe(process))  # type: ignore[return-value]


def new_pipe(process: Process) -> tuple[OpenFile, OpenFile]:
    """(the end to read, the end to write)."""
    disk = kernel().disk
    inode = Inode(disk, stat.S_IFIFO, 0o600, process.uid)
    inode.pipe = Pipe()
    inode.pipe.readers = inode.pipe.writers = 1
    return OpenFile(disk, inode, os.O_RDONLY, "pipe"), OpenFile(disk, inode, os.O_WRONLY, "pipe")


def set_blocking(fd: int, blocking: bool) -> None:
    file = _file(this(), fd)
    file.flags = file.flags & ~os.O_NONBLOCK if blocking else file.flags | os.O_NONBLOCK


def set_inheritable(fd: int, inheritable: bool) -> None:
    process = this()
    _file(process, fd)
    (process.inheritable.add if inheritable else process.inheritable.discard)(fd)


def isatty(fd: int) -> bool:
    return False


def getxattr(path: Any, name: Any, **_: Any) -> bytes:
    raise refuse(errno.EOPNOTSUPP, _text(path))
