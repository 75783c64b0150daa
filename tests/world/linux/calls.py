"""The calls of the simulated Linux, as Python's `os` names them: each is one step of the process that makes it."""

from __future__ import annotations

import errno
import os
import signal
import stat
from typing import Any, NamedTuple

from tests.world.linux.inodes import PIPE_BUF, Inode, OpenFile, Pipe, refuse
from tests.world.linux.kernel import Kernel, Killed, Process
from tests.world.linux.proc import content_of_proc, open_proc, read_proc_link, stat_of_proc

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


def _text(path: Any) -> str:
    text = path if type(path) is str else os.fsdecode(path)
    if "\0" in text:
        raise ValueError("embedded null byte")
    return text


def _at(process: Process, dir_fd: int | None, path: str) -> Inode | None:
    if dir_fd is None or path.startswith("/"):
        return None
    if dir_fd not in process.fds:
        raise refuse(errno.EBADF, path)
    return process.fds[dir_fd].inode


def _file(process: Process, fd: int) -> OpenFile:
    file = process.fds.get(fd)
    if file is None:
        raise refuse(errno.EBADF)
    return file


def _seekable(process: Process, fd: int) -> OpenFile:
    file = _file(process, fd)
    if file.inode.pipe is not None:
        raise refuse(errno.ESPIPE)
    return file


def _stat(inode: Inode) -> Stat:
    size = len(inode.target) if inode.kind == stat.S_IFLNK else len(inode.data)
    return Stat(
        inode.kind | inode.mode,
        inode.ino,
        DEVICE,
        max(1, len(inode.places)) if inode.places or inode is inode.disk.root or inode.pipe is not None else 0,
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
    inode = kernel().disk.lookup(process, path, follow=follow_symlinks, at=_at(process, dir_fd, path))[2]
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
    at, makes, is_new = _at(process, dir_fd, path), bool(flags & os.O_CREAT), False
    follow = not flags & os.O_NOFOLLOW and not (makes and (flags & os.O_EXCL or path.endswith("/")))
    found = disk.walk(process, path, at, follow) if makes else disk.lookup(process, path, follow=follow, at=at)
    inode = found.inode
    writes = flags & os.O_ACCMODE != os.O_RDONLY
    if makes and (found.has_slash or not found.is_name):
        raise refuse(errno.EEXIST if flags & os.O_EXCL and not found.has_slash else errno.EISDIR, path)
    if inode is None:
        if not makes:
            raise refuse(errno.ENOENT, path)
        inode, is_new = disk.make(process, found, stat.S_IFREG, mode, path), True
    else:
        if makes and flags & os.O_EXCL:
            raise refuse(errno.EEXIST, path)
        if flags & os.O_DIRECTORY and not inode.is_folder:
            raise refuse(errno.ENOTDIR, path)
        if inode.kind == stat.S_IFLNK:
            raise refuse(errno.ELOOP, path)
        if inode.is_folder and (writes or makes or flags & os.O_TRUNC):
            raise refuse(errno.EISDIR, path)
    wanted = 4 * (flags & os.O_ACCMODE != os.O_WRONLY) | 2 * writes
    if not is_new and any(bit & wanted and not disk.allows(process, inode, bit) for bit in (4, 2)):
        raise refuse(errno.EACCES, path)
    file = OpenFile(disk, inode, flags, path if path.startswith("/") else f"{process.cwd}/{path}")
    if found.is_name and inode.places:
        file.place = disk.place_of(found.folder, found.name)
    if flags & os.O_TRUNC and not is_new and inode.kind == stat.S_IFREG and not inode.device:
        _resize(inode, 0)
    return _new_fd(process, file)


def read_proc(path: Any) -> bytes | None:
    """What a file of /proc says now, in one step: nobody can change what has been opened there. None for another."""
    if type(path) is not str or not path.startswith("/proc/") or "/fd/" in path:
        return None
    process = kernel().step("open", path)
    return content_of_proc(kernel(), process, path)


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
    inode.mtime_ns, inode.written_ns = kernel().unix_ns(), kernel().now_ns
    kernel().say("written", inode)


def mkdir(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
    path = _text(path)
    process = kernel().step("mkdir", path)
    found = kernel().disk.place_for(process, path, _at(process, dir_fd, path), folder=True)
    kernel().disk.make(process, found, stat.S_IFDIR, mode, path)


def rmdir(path: Any, *, dir_fd: int | None = None) -> None:
    path = _text(path)
    process = kernel().step("rmdir", path)
    found = kernel().disk.walk(process, path, _at(process, dir_fd, path), False)
    inode = found.inode
    if not found.is_name:
        raise refuse({"/": errno.EBUSY, ".": errno.EINVAL, "..": errno.ENOTEMPTY}[found.name], path)
    if inode is None:
        raise refuse(errno.ENOENT, path)
    kernel().disk.check_writable(process, found.folder, path, inode)
    if not inode.is_folder:
        raise refuse(errno.ENOTDIR, path)
    if inode.names:
        raise refuse(errno.ENOTEMPTY, path)
    kernel().disk.drop(found.folder, found.name)


def unlink(path: Any, *, dir_fd: int | None = None) -> None:
    path = _text(path)
    process = kernel().step("unlink", path)
    found = kernel().disk.walk(process, path, _at(process, dir_fd, path), False)
    inode = found.inode
    if not found.is_name:
        raise refuse(errno.EISDIR, path)
    if inode is None:
        raise refuse(errno.ENOENT, path)
    if found.has_slash and not inode.is_folder:
        raise refuse(errno.ENOTDIR, path)
    kernel().disk.check_writable(process, found.folder, path, inode)
    if inode.is_folder:
        raise refuse(errno.EISDIR, path)
    kernel().disk.drop(found.folder, found.name)


def rename(old: Any, new: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
    old, new = _text(old), _text(new)
    process = kernel().step("rename", new)
    try:
        kernel().disk.rename(process, old, new, _at(process, src_dir_fd, old), _at(process, dst_dir_fd, new))
    except OSError as refused:
        raise _of_both(refused, old, new) from None


def _of_both(refused: OSError, old: str, new: str) -> OSError:
    return OSError(refused.errno, refused.strerror, old, None, new)


def symlink(target: Any, path: Any, target_is_directory: bool = False, *, dir_fd: int | None = None) -> None:
    target, path = _text(target), _text(path)
    process = kernel().step("symlink", path)
    disk = kernel().disk
    try:
        if not target:
            raise refuse(errno.ENOENT)
        found = disk.place_for(process, path, _at(process, dir_fd, path))
        disk.make(process, found, stat.S_IFLNK, 0o777, path).target = target
    except OSError as refused:
        raise _of_both(refused, target, path) from None


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
    follows = follow_symlinks and (src_dir_fd is not None or dst_dir_fd is not None)  # without, Python calls link(2)
    disk = kernel().disk
    try:
        if source.startswith("/proc/"):
            if not follows:
                raise refuse(errno.EXDEV)
            inode: Inode | None = open_proc(kernel(), process, source, os.O_RDONLY).inode
        else:
            inode = disk.lookup(process, source, follow=follows, at=_at(process, src_dir_fd, source)).inode
        if inode is None:
            raise refuse(errno.ENOENT)
        found = disk.place_for(process, path, _at(process, dst_dir_fd, path))
        if inode.is_folder:
            raise refuse(errno.EPERM)
        disk.check_named(found.folder, path)
        disk.check_writable(process, found.folder, path)
        if not inode.places:
            raise refuse(errno.ENOENT)
        disk.put(found.folder, found.name, inode)
    except OSError as refused:
        raise _of_both(refused, source, path) from None


def readlink(path: Any, *, dir_fd: int | None = None) -> Any:
    if isinstance(path, bytes):
        return os.fsencode(readlink(os.fsdecode(path), dir_fd=dir_fd))
    path = _text(path)
    process = kernel().step("readlink", path)
    if path.startswith("/proc/"):
        return read_proc_link(kernel(), process, path)
    inode = kernel().disk.lookup(process, path, follow=False, at=_at(process, dir_fd, path))[2]
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


def listdir(path: Any = ".") -> list[Any]:
    if isinstance(path, bytes):
        return [os.fsencode(name) for name in listdir(os.fsdecode(path))]
    if isinstance(path, str) and path.startswith("/proc"):
        process = kernel().step("listdir", path)
        names = open_proc(kernel(), process, path, os.O_DIRECTORY).content
        assert names is not None
        return names.decode().split()
    return list(_folder(path, "listdir")[2].names)


def _at_path(name: str, path: Any, dir_fd: int | None = None) -> Inode:
    path = _text(path)
    process = kernel().step(name, path)
    inode = kernel().disk.lookup(process, path, at=_at(process, dir_fd, path))[2]
    if inode is None:
        raise refuse(errno.ENOENT, path)
    return inode


def truncate(path: Any, length: int) -> None:
    if isinstance(path, int):
        file = _file(kernel().step("truncate"), path)
        inode, path = file.inode, None
        if length < 0 or inode.kind != stat.S_IFREG or not file.can_write:
            raise refuse(errno.EINVAL)
    else:
        if length < 0:
            raise refuse(errno.EINVAL, _text(path))
        inode = _at_path("truncate", path)
        if inode.is_folder:
            raise refuse(errno.EISDIR, _text(path))
    if length - len(inode.data) > kernel().disk.room():
        raise refuse(errno.ENOSPC)
    _resize(inode, length)


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
    if not file.can_read:
        raise refuse(errno.EBADF)
    if not pipe.data and pipe.writers:
        if file.flags & os.O_NONBLOCK:
            raise refuse(errno.EAGAIN)
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
        return _write_file(process, file, bytes(data))
    if not file.can_write:
        raise refuse(errno.EBADF)
    rest = bytes(data)
    while rest:
        least = len(rest) if len(rest) <= PIPE_BUF else 1  # what is small goes as one
        if pipe.readers and pipe.room < least:
            if file.flags & os.O_NONBLOCK:
                break
            kernel().block(lambda least=least: pipe.room >= least or not pipe.readers, pipe.changed)  # type: ignore[misc]
        if not pipe.readers:
            kernel().signal(process, signal.SIGPIPE)
            this()
            if len(rest) < len(data):
                break
            raise refuse(errno.EPIPE)
        part, rest = rest[: pipe.room], rest[pipe.room :]
        file.write(part)
    if len(rest) == len(data) and rest:
        raise refuse(errno.EAGAIN)
    return len(data) - len(rest)


def pread(fd: int, size: int, offset: int) -> bytes:
    return _seekable(kernel().step("pread"), fd).pread(size, offset)


def _write_file(process: Process, file: OpenFile, data: bytes) -> int:
    most = kernel().ends_in_write(process, file, data)
    if most is None:
        return file.write(data)
    file.write(data[:most])
    kernel().crash(process)
    raise Killed


def pwrite(fd: int, data: Any, offset: int) -> int:
    return _seekable(kernel().step("pwrite"), fd).write(bytes(data), offset)


def lseek(fd: int, position: int, how: int) -> int:
    file = _seekable(kernel().step("lseek"), fd)
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


ftruncate = truncate


def fsync(fd: int) -> None:
    file = _file(kernel().step("fsync"), fd)
    if file.inode.pipe is not None or file.inode.device:
        raise refuse(errno.EINVAL)
    if kernel().disk.sync_s:
        kernel().sleep(kernel().disk.sync_s)
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
