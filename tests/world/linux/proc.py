"""/proc of the simulated Linux, as far as somebody here reads it."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.world.linux.inodes import Inode, OpenFile, refuse

if TYPE_CHECKING:
    from tests.world.linux.kernel import Kernel, Process


def find(kernel: Kernel, asking: Process, path: str) -> tuple[Process | None, list[str]]:
    """(the process of /proc/PID/…, what comes after). ENOENT where there is none."""
    parts = [part for part in path.split("/") if part][1:]
    if not parts:
        return None, []
    if parts[0] == "self":
        return asking, parts[1:]
    if parts[0].isdigit():
        process = kernel.processes.get(int(parts[0]))
        if process is None:
            raise refuse(errno.ENOENT, path)
        return process, parts[1:]
    return None, parts


def _may_look(asking: Process, process: Process, path: str) -> None:
    if asking.uid not in (0, process.uid):
        raise refuse(errno.EACCES, path)


def open_proc(kernel: Kernel, asking: Process, path: str, flags: int) -> OpenFile:
    """A file of /proc with what it says now; of a folder the names."""
    process, rest = find(kernel, asking, path)
    if process is not None and rest[:1] == ["fd"] and len(rest) == 2:
        file = process.fds.get(int(rest[1]))
        if file is None:
            raise refuse(errno.ENOENT, path)
        again = OpenFile(kernel.disk, file.inode, flags, file.path)
        again.place = file.place
        return again
    inode = Inode(kernel.disk, stat.S_IFREG, 0o444, 0)
    found = OpenFile(kernel.disk, inode, flags, path)
    found.content = _content(kernel, asking, process, rest, path)
    return found


def content_of_proc(kernel: Kernel, asking: Process, path: str) -> bytes:
    """What a file there says now."""
    return _content(kernel, asking, *find(kernel, asking, path), path)


def _content(kernel: Kernel, asking: Process, process: Process | None, rest: list[str], path: str) -> bytes:
    if process is None:
        return _of_the_host(kernel, rest, path)
    return _of(kernel, asking, process, rest, path)


def _of_the_host(kernel: Kernel, rest: list[str], path: str) -> bytes:
    name = "/".join(rest)
    if not rest:
        return " ".join(map(str, [*kernel.processes, "sys", "locks", "meminfo"])).encode()
    if name == "sys/kernel/random/boot_id":
        return kernel.boot_id.encode() + b"\n"
    if name == "locks":
        return _locks(kernel)
    if name == "meminfo":
        return b"MemTotal: 65536000 kB\nMemAvailable: 60000000 kB\nSwapTotal: 0 kB\nSwapFree: 0 kB\n"
    if name in ("mounts", "self/mounts"):
        return b"/dev/vda / ext4 rw,relatime 0 0\n"
    raise refuse(errno.ENOENT, path)


def _locks(kernel: Kernel) -> bytes:
    lines = []
    for process in kernel.processes.values():
        for file in process.fds.values():
            kind = file.inode.locks.get(file)
            if kind is not None:
                word = "WRITE" if kind == fcntl.LOCK_EX else "READ"
                lines.append(f"{len(lines) + 1}: FLOCK  ADVISORY  {word} {process.pid} 08:01:{file.inode.ino} 0 EOF\n")
    return "".join(lines).encode()


def _of(kernel: Kernel, asking: Process, process: Process, rest: list[str], path: str) -> bytes:
    name = "/".join(rest)
    if name == "stat":
        parent = process.parent.pid if process.parent else 0
        fields = [process.state_now(), parent, process.group, process.session, *[0] * 15, process.start]
        return f"{process.pid} (python3) {' '.join(map(str, fields))} 0 0 0\n".encode()
    if name == "status":
        return f"Name:\tpython3\nUid:\t{process.uid}\t{process.uid}\t{process.uid}\t{process.uid}\n".encode()
    if name in ("cmdline", "comm"):
        if process.is_over:
            return b""
        return b"".join(word.encode("utf-8", "surrogateescape") + b"\0" for word in process.argv)
    if name in ("cgroup", "oom_score", "mounts", "mountinfo"):
        raise refuse(errno.ENOENT, path)
    _may_look(asking, process, path)
    if name == "environ":
        return b"".join(f"{k}={v}".encode("utf-8", "surrogateescape") + b"\0" for k, v in process.first_env.items())
    if name == "fd":
        return " ".join(map(str, process.fds)).encode()
    if rest[0] == "fdinfo" and len(rest) == 2:
        file = process.fds.get(int(rest[1]))
        if file is None:
            raise refuse(errno.ENOENT, path)
        kind = file.inode.locks.get(file)
        word = {fcntl.LOCK_EX: "WRITE", fcntl.LOCK_SH: "READ"}.get(kind or 0)
        line = f"lock:\t1: FLOCK  ADVISORY  {word} {process.pid} 08:01:{file.inode.ino} 0 EOF\n" if word else ""
        return f"pos:\t{file.position}\n{line}".encode()
    if rest[0] == "task" and name.endswith("/children"):
        return "".join(f"{child.pid} " for child in process.children).encode()
    raise refuse(errno.ENOENT, path)


def read_proc_link(kernel: Kernel, asking: Process, path: str) -> str:
    process, rest = find(kernel, asking, path)
    if process is None:
        raise refuse(errno.EINVAL, path)
    _may_look(asking, process, path)
    if rest[:1] == ["fd"] and len(rest) == 2 and rest[1].isdigit():
        file = process.fds.get(int(rest[1]))
        if file is None:
            raise refuse(errno.ENOENT, path)
        return file.where()
    if rest == ["ns", "uts"]:
        return f"uts:[{process.host}]"
    if rest == ["cwd"]:
        return process.cwd
    raise refuse(errno.ENOENT, path)


def stat_of_proc(kernel: Kernel, asking: Process, path: str, stat_of: Callable[[Inode], Any], follow: bool) -> Any:
    process, rest = find(kernel, asking, path)
    if process is not None and rest[:1] == ["fd"] and len(rest) == 2:
        file = process.fds.get(int(rest[1]))
        if file is None:
            raise refuse(errno.ENOENT, path)
        _may_look(asking, process, path)
        return stat_of(file.inode)
    is_folder = not rest or rest in (["fd"], ["fdinfo"], ["task"])
    inode = Inode(kernel.disk, stat.S_IFDIR if is_folder else stat.S_IFREG, 0o555, process.uid if process else 0)
    if not is_folder:
        open_proc(kernel, asking, path, os.O_RDONLY).release()
    return stat_of(inode)
