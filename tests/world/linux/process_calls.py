"""Calls of the simulated Linux about processes, and those that wait for one."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from select import POLLERR, POLLHUP, POLLIN, POLLNVAL, POLLOUT
from typing import Any, NamedTuple

from tests.world.linux.calls import _file, kernel, this
from tests.world.linux.channel import Channel
from tests.world.linux.inodes import PIPE_BUF, refuse
from tests.world.linux.kernel import Killed, Process, exit_code


def getcwd() -> str:
    return this().cwd


def umask(mask: int) -> int:
    process = this()
    before, process.umask = process.umask, mask
    return before


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
    if process is not me and process not in me.children:
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
    others = (p for p in kernel().processes.values() if p.group == group and p.session == me.session)
    no_group = group not in (0, process.pid) and next(others, None) is None
    if process.session == process.pid or process.session != me.session or no_group:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
    if process is not me and process.has_execed:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    process.group = group or process.pid


def _may_signal(process: Process) -> None:
    if this().uid not in (0, process.uid):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))


def kill(pid: int, number: int) -> None:
    kernel().step("kill", str(pid))
    _check_signal(number)
    process = _process(pid)
    _may_signal(process)
    if number:
        kernel().signal(process, number)
    _after_signals()


def _check_signal(number: int) -> None:
    if not 0 <= number < signal.NSIG:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def _after_signals() -> None:
    """Whoever has signalled itself has heard it before the call is over."""
    me = this()
    if me.pending:
        kernel().handle_signals(me)


def killpg(group: int, number: int) -> None:
    kernel().step("killpg", str(group))
    _check_signal(number)
    found = [p for p in kernel().processes.values() if p.group == group and p.pid != 1]
    if not found:
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
    for process in found:
        if number and this().uid in (0, process.uid):
            kernel().signal(process, number)
    _after_signals()


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


class Waited(NamedTuple):
    """What waitid tells."""

    si_pid: int
    si_status: int
    si_signo: int = signal.SIGCHLD


def waitid(kind: int, number: int, options: int) -> Waited | None:
    process = kernel().step("waitid")
    if not process.children:
        raise ChildProcessError(errno.ECHILD, os.strerror(errno.ECHILD))
    if kind != os.P_ALL or not options & os.WNOWAIT or not options & os.WNOHANG:
        raise NotImplementedError("os.waitid but for a look at any child is not simulated")
    status = next(((child.pid, child.status) for child in process.children if child.is_over), None)
    return None if status is None else Waited(status[0], status[1] & 0x7F or status[1] >> 8)


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
    child.own = {key: value for key, value in process.own.items() if key not in ("halted", "main thread")}
    kernel().start(child, body)
    return child.pid


def execvp(name: str, argv: list[str]) -> None:
    """Becomes another program, which ends as this process."""
    from tests.world.programs import body_of

    process = kernel().step("exec", name)
    try:
        body = body_of([name, *argv[1:]], process.env, process.cwd)
    except OSError as refused:
        raise refuse(refused.errno or 0) from None  # Python names no file here
    process.argv = list(argv)
    process.first_env, process.has_execed = dict(process.env), True
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
    file = _file(process, _number(fd))
    disk = kernel().disk
    if how & fcntl.LOCK_UN:
        disk.unlock(file)
    elif not disk.try_lock(file, how):
        if how & fcntl.LOCK_NB:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        kernel().block(lambda: disk.try_lock(file, how), file.inode.unlocked)


def select(
    readers: list[Any], writers: list[Any], others: list[Any], timeout: float | None = None
) -> tuple[list[Any], list[Any], list[Any]]:
    process = kernel().step("select")

    def ready() -> tuple[list[Any], list[Any], list[Any]]:
        readable = [end for end in readers if _is_readable(process, _number(end))]
        return readable, [end for end in writers if _has_room(process, _number(end))], []

    channels: list[Channel] = []
    for one in (*readers, *writers):
        end = _file(process, _number(one)).inode.pipe
        channels += [end.changed] if end is not None else []
    deadline = None if timeout is None else kernel().now_ns + int(timeout * 1e9)
    kernel().block(lambda: any(ready()), *channels, deadline_ns=deadline)
    return ready()


def _number(fd: Any) -> int:
    number: int = fd if isinstance(fd, int) else fd.fileno()
    return number


def _is_readable(process: Process, fd: int) -> bool:
    end = _file(process, fd).inode.pipe
    return end is None or bool(end.data) or not end.writers


def _has_room(process: Process, fd: int) -> bool:
    end = _file(process, fd).inode.pipe
    return end is None or end.room >= PIPE_BUF or not end.readers


class Poll:
    """As select.poll."""

    def __init__(self) -> None:
        self._wanted: dict[int, int] = {}

    def register(self, fd: Any, events: int = POLLIN | POLLOUT) -> None:
        self._wanted[_number(fd)] = events

    modify = register

    def unregister(self, fd: Any) -> None:
        del self._wanted[_number(fd)]

    def poll(self, timeout: float | None = None) -> list[tuple[int, int]]:
        process = kernel().step("poll")
        ends = [_file(process, fd).inode.pipe for fd in self._wanted if fd in process.fds]
        deadline = None if timeout is None or timeout < 0 else kernel().now_ns + int(timeout * 1e6)
        channels = [end.changed for end in ends if end is not None]
        kernel().block(lambda: bool(self._ready(process)), *channels, deadline_ns=deadline)
        return self._ready(process)

    def _ready(self, process: Process) -> list[tuple[int, int]]:
        found = [(fd, self._events(process, fd, wanted)) for fd, wanted in self._wanted.items()]
        return [(fd, events) for fd, events in found if events]

    @staticmethod
    def _events(process: Process, fd: int, wanted: int) -> int:
        file = process.fds.get(fd)
        if file is None:
            return POLLNVAL
        end = file.inode.pipe
        if end is None:
            return wanted & (POLLIN | POLLOUT)
        if file.can_read:
            return (wanted & POLLIN if end.data else 0) | (0 if end.writers else POLLHUP)
        return (wanted & POLLOUT if end.room >= PIPE_BUF else 0) | (0 if end.readers else POLLERR)
