"""Calls of the simulated Linux about processes, and those that wait for one."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from typing import Any

from tests.world.calls import _file, kernel, this
from tests.world.disk import PIPE_BYTES
from tests.world.kernel import Channel, Killed, Process, exit_code


def getpid() -> int:
    return this().pid


def getppid() -> int:
    parent = this().parent
    return parent.pid if parent else 0


def getuid() -> int:
    return this().uid


def getpgrp() -> int:
    return this().group


def _process(pid: int) -> Process:
    process = kernel().processes.get(pid)
    if process is None:
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
    return process


def getpgid(pid: int) -> int:
    me = kernel().step("getpgid")
    return (_process(pid) if pid else me).group


def setpgid(pid: int, group: int) -> None:
    me = kernel().step("setpgid")
    process = _process(pid) if pid else me
    process.group = group or process.pid


def _may_signal(process: Process) -> None:
    if this().uid not in (0, process.uid):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))


def kill(pid: int, number: int) -> None:
    kernel().step("kill", str(pid))
    process = _process(pid)
    _may_signal(process)
    if number:
        kernel().signal(process, number)
    this()


def killpg(group: int, number: int) -> None:
    kernel().step("killpg", str(group))
    found = [p for p in kernel().processes.values() if p.group == group and p.pid != 1]
    if not found:
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
    for process in found:
        if number and this().uid in (0, process.uid):
            kernel().signal(process, number)
    this()


def waitpid(pid: int, options: int) -> tuple[int, int]:
    process = kernel().step("waitpid")

    def ended() -> Process | None:
        wanted = [child for child in process.children if pid in (-1, child.pid)]
        if not wanted:
            raise ChildProcessError(errno.ECHILD, os.strerror(errno.ECHILD))
        return next((child for child in wanted if child.is_over), None)

    found = ended()
    if found is None:
        if options & os.WNOHANG:
            return 0, 0
        kernel().block(lambda: ended() is not None, process.child_ended)
        found = ended()
    assert found is not None
    kernel().reap(found)
    return found.pid, found.status


def waitid(kind: int, number: int, options: int) -> Any:
    process = kernel().step("waitid")
    if not process.children:
        raise ChildProcessError(errno.ECHILD, os.strerror(errno.ECHILD))
    assert options & os.WNOWAIT and options & os.WNOHANG
    return next((child.pid for child in process.children if child.is_over), None)


def exit_(code: int) -> None:
    process = this()
    kernel().end(process, (code & 0xFF) << 8)
    raise Killed


def fork_run(body: Callable[[], None]) -> int:
    """A child that is a copy of this process and does `body`: what `fork` and its branch are elsewhere."""
    process = kernel().step("fork")
    child = kernel().new_process(process, list(process.argv), dict(process.env))
    child.handlers = dict(process.handlers)
    child.is_subreaper = False
    for fd, file in process.fds.items():
        child.fds[fd] = file.copy()
    child.inheritable = set(process.inheritable)
    child.own = {key: value for key, value in process.own.items() if key != "halted"}
    kernel().start(child, body)
    return child.pid


def execvp(name: str, argv: list[str]) -> None:
    """Becomes another program, which ends as this process."""
    from tests.world.programs import body_of

    process = kernel().step("exec", name)
    body = body_of(list(argv), process.env, process.cwd)
    process.argv = list(argv)
    process.handlers = {s: h for s, h in process.handlers.items() if h == signal.SIG_IGN}
    for fd in [fd for fd in process.fds if fd > 2 and fd not in process.inheritable]:
        process.fds.pop(fd).release()
    process.own = {}
    kernel().say("exec", process)
    code = 0
    try:
        body()
    except SystemExit as left:
        code = exit_code(left, process)
    kernel().end(process, code << 8)
    raise Killed


def uname() -> Any:
    return os.uname_result(("Linux", this().host, "6.1.0", "#1", "x86_64"))


def urandom(size: int) -> bytes:
    return kernel().bytes.randbytes(size)


def nice(by: int) -> int:
    return 0


def sysconf(name: Any) -> int:
    return {"SC_CLK_TCK": 100, "SC_PAGE_SIZE": 4096, "SC_NPROCESSORS_ONLN": 8}.get(name, 0)


def sched_getaffinity(pid: int) -> set[int]:
    return set(range(8))


def flock(fd: Any, how: int) -> None:
    import fcntl

    process = kernel().step("flock")
    file = _file(process, fd if isinstance(fd, int) else fd.fileno())
    disk = kernel().disk
    if how & fcntl.LOCK_UN:
        disk.unlock(file)
    elif not disk.try_lock(file, how):
        if how & fcntl.LOCK_NB:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        kernel().block(lambda: disk.try_lock(file, how), file.inode.unlocked)


def select(
    readers: list[int], writers: list[int], others: list[int], timeout: float | None = None
) -> tuple[list[int], list[int], list[int]]:
    process = kernel().step("select")

    def ready() -> tuple[list[int], list[int], list[int]]:
        return [fd for fd in readers if _is_readable(process, fd)], [w for w in writers if _has_room(process, w)], []

    channels: list[Channel] = []
    for fd in (*readers, *writers):
        end = _file(process, fd).inode.pipe
        channels += [end.changed] if end is not None else []
    deadline = None if timeout is None else kernel().now_ns + int(timeout * 1e9)
    kernel().block(lambda: any(ready()), *channels, deadline_ns=deadline)
    return ready()


def _is_readable(process: Process, fd: int) -> bool:
    end = _file(process, fd).inode.pipe
    return end is None or bool(end.data) or not end.writers


def _has_room(process: Process, fd: int) -> bool:
    end = _file(process, fd).inode.pipe
    return end is None or len(end.data) < PIPE_BYTES or not end.readers
