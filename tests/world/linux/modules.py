"""The standard library as the simulated processes see it: `os`, `time`, `threading` and the others that touch the world
lead into it; what is pure is the real one, and some is the real source on top of ours.
"""

from __future__ import annotations

import builtins
import enum
import errno
import fcntl
import io
import os
import queue
import secrets
import select
import signal
import stat
import subprocess
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.world.linux import attributes, calls, entries, process_calls
from tests.world.linux.calls import kernel, this
from tests.world.linux.channel import Channel
from tests.world.linux.inodes import refuse
from tests.world.linux.kernel import IGNORED, Killed, S
from tests.world.linux.spawn import Popen, run
from tests.world.linux.streams import file_io, open_
from tests.world.linux.threads import Condition, Event, Lock, RLock, Thread, current_thread, main_thread

PYTHON = "/usr/bin/python3"


# --- os ---------------------------------------------------------------------------------------------------------------


class Environ(dict[str, str]):
    """Each process's own: what is kept here is never looked at."""

    def __getitem__(self, name: str) -> str:
        return this().env[name]

    def __setitem__(self, name: str, text: str) -> None:
        this().env[name] = text

    def __delitem__(self, name: str) -> None:
        del this().env[name]

    def __iter__(self) -> Iterator[str]:
        return iter(this().env)

    def __len__(self) -> int:
        return len(this().env)

    def __contains__(self, name: object) -> bool:
        return name in this().env

    def keys(self) -> Any:
        return this().env.keys()

    def items(self) -> Any:
        return this().env.items()

    def values(self) -> Any:
        return this().env.values()

    def get(self, name: str, default: Any = None) -> Any:
        return this().env.get(name, default)

    def pop(self, name: str, *default: Any) -> Any:
        return this().env.pop(name, *default)

    def copy(self) -> dict[str, str]:
        return dict(this().env)

    def setdefault(self, name: str, default: str = "") -> str:
        return this().env.setdefault(name, default)


_NAMES = [
    "lstat",
    "fstat",
    "mkdir",
    "rmdir",
    "unlink",
    "rename",
    "symlink",
    "link",
    "readlink",
    "listdir",
    "chmod",
    "fchmod",
    "fchown",
    "utime",
    "access",
    "truncate",
    "statvfs",
    "getcwd",
    "umask",
    "close",
    "read",
    "write",
    "pread",
    "pwrite",
    "lseek",
    "ftruncate",
    "fsync",
    "dup",
    "dup2",
    "pipe",
    "set_blocking",
    "set_inheritable",
    "isatty",
    "getxattr",
    "getpid",
    "getppid",
    "getuid",
    "getpgrp",
    "getpgid",
    "setpgid",
    "kill",
    "killpg",
    "waitpid",
    "waitid",
    "uname",
    "urandom",
    "nice",
    "sysconf",
    "sched_getaffinity",
    "execvp",
]


def _find(name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = next(
        getattr(place, name) for place in (calls, attributes, process_calls) if hasattr(place, name)
    )
    return found


_CALLS = {
    **{name: _find(name) for name in _NAMES},
    "stat": calls.stat_,
    "open": calls.open_,
    "replace": calls.rename,
    "remove": calls.unlink,
    "geteuid": process_calls.getuid,
    "getgid": process_calls.getuid,
    "_exit": process_calls.exit_,
    "fdatasync": calls.fsync,
    "scandir": entries.scandir,
    "DirEntry": entries.Entry,
}
_PURE = [
    "fsencode",
    "fsdecode",
    "fspath",
    "strerror",
    "PathLike",
    "stat_result",
    "error",
    "major",
    "minor",
    "makedev",
    "WIFSIGNALED",
    "WTERMSIG",
    "WIFEXITED",
    "WEXITSTATUS",
    "WIFSTOPPED",
    "WSTOPSIG",
    "waitstatus_to_exitcode",
    "uname_result",
]
_NOT_HERE = (
    "fork",
    "execv",
    "execve",
    "system",
    "popen",
    "spawnv",
    "posix_spawn",
    "chown",
    "mkfifo",
    "mknod",
    "copy_file_range",
    "sendfile",
)


def _format_exc() -> str:
    """An agent tells errors of the host without; so what it does not expect is a fault of ours."""
    text = traceback.format_exc()
    if this().argv[-1] == "agent":
        kernel().failure = kernel().failure or f"the agent failed: {text}"
    return text


def _refused(name: str) -> Callable[..., Any]:
    def call(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{name} is not simulated")

    return call


def _rebuilt(function: Any, names: dict[str, Any]) -> Any:
    """A function of the standard library on top of other names."""
    built = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    built.__kwdefaults__ = function.__kwdefaults__
    return built


def _in_one_step(word: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that asks much and changes nothing: nobody comes between its calls, which are many."""

    def call(*words: Any, **named: Any) -> Any:
        kernel().step(word)
        kernel().is_aside = True
        try:
            return function(*words, **named)
        finally:
            kernel().is_aside = False

    return call


def _make_os() -> types.ModuleType:
    made = types.ModuleType("os")
    names = made.__dict__
    for name, value in os.__dict__.items():
        if not callable(value) or name in _PURE:
            names.setdefault(name, value)
    names.update(_CALLS)
    names.update({name: _refused(f"os.{name}") for name in _NOT_HERE})
    names["environ"] = Environ()
    names["sys"] = sys
    names["fdopen"] = lambda fd, mode="r", *a, **k: open_(fd, mode, *a, **k)
    names["getenv"] = lambda name, default=None: this().env.get(name, default)
    names["path"] = path = types.ModuleType("posixpath")
    names["__builtins__"] = {**vars(builtins), "open": open_}
    _exec(Path(os.path.__file__).with_name("genericpath.py"), generic := {"__name__": "genericpath"}, {"os": made})
    generic_module = types.ModuleType("genericpath")
    generic_module.__dict__.update(generic)
    _exec(Path(os.path.__file__), path.__dict__, {"os": made, "genericpath": generic_module, "posix": made})
    path.__dict__["realpath"] = _in_one_step("realpath", path.__dict__["realpath"])
    for name in ("makedirs", "walk", "_walk", "removedirs", "get_exec_path"):
        if hasattr(os, name):  # `_walk` until Python 3.11
            names[name] = _rebuilt(getattr(os, name), names)
    for name in ("supports_dir_fd", "supports_fd", "supports_follow_symlinks"):
        names[name] = {names[call.__name__] for call in getattr(os, name) if call.__name__ in _CALLS}
    return made


def _exec(source: Path, names: dict[str, Any], imports: dict[str, Any]) -> None:
    def import_(name: str, *words: Any) -> Any:
        if name == "posix":
            return types.ModuleType(name)  # what it would offer is faster, and reads the real disk
        return imports[name] if name in imports else __import__(name, *words)

    names["__builtins__"] = {**vars(builtins), "open": open_, "__import__": import_}
    exec(compile(source.read_text(), str(source), "exec"), names)


# --- time, signals, locks, processes ----------------------------------------------------------------------------------


def _module(name: str, of: types.ModuleType, pure: str = "", **names: Any) -> types.ModuleType:
    """`of` with these names instead; what else can be called is refused, unless it touches no world (`pure`)."""
    made = types.ModuleType(name)
    for key, value in of.__dict__.items():
        if not key.startswith("__"):
            is_real = (
                callable(value)
                and key not in pure.split()
                and not (isinstance(value, type) and issubclass(value, (BaseException, enum.Enum)))
            )
            made.__dict__[key] = _refused(f"{name}.{key}") if is_real else value
    made.__dict__.update(names)
    return made


def _gmtime(seconds: float | None = None) -> time.struct_time:
    return time.gmtime(kernel().unix_ns() / 1e9 if seconds is None else seconds)


TIME = _module(
    "time",
    time,
    "struct_time strptime mktime asctime",
    time=lambda: kernel().unix_ns() / 1e9,
    time_ns=lambda: kernel().unix_ns(),
    monotonic=lambda: kernel().boot_ns() / 1e9,
    monotonic_ns=lambda: kernel().boot_ns(),
    perf_counter=lambda: kernel().boot_ns() / 1e9,
    clock_gettime=lambda clock: kernel().boot_ns() / 1e9,
    sleep=lambda seconds: (kernel().step("sleep"), kernel().sleep(seconds))[1],
    gmtime=_gmtime,
    localtime=_gmtime,
    strftime=lambda form, moment=None: time.strftime(form, _gmtime() if moment is None else moment),
)


def _signal(number: int, handler: Any) -> Any:
    process = this()
    if process.threads and kernel().current is not process.main:
        raise ValueError("signal only works in main thread of the main interpreter")
    if not 0 < number < signal.NSIG:
        raise ValueError("signal number out of range")
    if number in (signal.SIGKILL, signal.SIGSTOP):
        raise refuse(errno.EINVAL)
    before = process.handlers.get(number, signal.SIG_DFL)
    process.handlers[number] = handler
    drops = handler == signal.SIG_IGN or (handler == signal.SIG_DFL and number in IGNORED)
    if drops and number in process.pending:
        process.pending.remove(number)
    return before


def _mask(how: int, numbers: Any) -> set[int]:
    process = kernel().step("sigmask")
    before = set(process.blocked)
    given = set(map(int, numbers))
    if how == signal.SIG_BLOCK:
        process.blocked |= given
    elif how == signal.SIG_UNBLOCK:
        process.blocked -= given
    else:
        process.blocked = given
    kernel().handle_signals(process)
    return before


class _Info:
    def __init__(self, number: int) -> None:
        self.si_signo = number


def _take_signal(numbers: Any, deadline_ns: int | None) -> int | None:
    process = kernel().step("sigwait")
    wanted = set(map(int, numbers))

    def there() -> list[int]:
        return [number for number in process.pending if number in wanted]

    kernel().block(lambda: bool(there()), deadline_ns=deadline_ns)
    found = there()
    if not found:
        return None
    process.pending.remove(found[0])
    return found[0]


def _sigtimedwait(numbers: Any, seconds: float) -> _Info | None:
    found = _take_signal(numbers, kernel().now_ns + int(seconds * S))
    return None if found is None else _Info(found)


SIGNAL = _module(
    "signal",
    signal,
    "strsignal valid_signals default_int_handler struct_siginfo",
    signal=_signal,
    getsignal=lambda number: this().handlers.get(number, signal.SIG_DFL),
    pthread_sigmask=_mask,
    sigwait=lambda numbers: _take_signal(numbers, None),
    sigtimedwait=_sigtimedwait,
    setitimer=lambda *_: (0.0, 0.0),
)

THREADING = _module(
    "threading",
    threading,
    Thread=Thread,
    Event=Event,
    Lock=Lock,
    RLock=RLock,
    Condition=Condition,
    current_thread=current_thread,
    main_thread=main_thread,
)


class _LibC:
    """What is called by ctypes."""

    def prctl(self, what: int, value: int, *_: int) -> int:
        process = kernel().step("prctl")
        if what == 36:
            process.is_subreaper = bool(value)
        elif what == 1:
            process.dies_with_parent = value
        return 0


class _CTypes(types.ModuleType):
    c_int = c_int64 = c_char_p = int

    @staticmethod
    def CDLL(name: object, use_errno: bool = False) -> _LibC:
        return _LibC()


def _no_ioctl(*_: Any) -> Any:
    raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


SUBPROCESS = _module("subprocess", subprocess, "CompletedProcess list2cmdline", Popen=Popen, run=run)
OS = _make_os()


class _Sys(types.ModuleType):
    """sys, with what is a process's own."""

    executable = PYTHON
    dont_write_bytecode = True

    def __getattr__(self, name: str) -> Any:
        if name in ("stdin", "stdout", "stderr"):
            return Stream({"stdin": 0, "stdout": 1, "stderr": 2}[name])
        if name == "argv":
            return this().argv
        return getattr(sys, name)


class Stream:
    """A standard stream."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.encoding = "utf-8"

    @property
    def buffer(self) -> Any:
        return open_(self._fd, "rb" if self._fd == 0 else "wb", closefd=False)

    def write(self, text: str) -> int:
        calls.write(self._fd, text.encode("utf-8", "surrogateescape"))
        return len(text)

    def flush(self) -> None:
        pass

    def fileno(self) -> int:
        return self._fd


def _with_ours(module: types.ModuleType, **imports: Any) -> types.ModuleType:
    """The source of a module of the standard library on top of ours."""
    made = types.ModuleType(module.__name__)
    assert module.__file__ is not None
    names = made.__dict__
    names["__name__"] = module.__name__
    _exec(Path(module.__file__), names, imports)
    return made


def _make_all() -> dict[str, types.ModuleType]:
    import fnmatch
    import glob
    import shutil

    found: dict[str, types.ModuleType] = {
        "os": OS,
        "os.path": OS.path,
        "posixpath": OS.path,
        "time": TIME,
        "signal": SIGNAL,
        "threading": THREADING,
        "subprocess": SUBPROCESS,
        "fcntl": _module("fcntl", fcntl, flock=process_calls.flock, ioctl=_no_ioctl),
        "select": _module("select", select, select=process_calls.select, poll=process_calls.Poll),
        "ctypes": _CTypes("ctypes"),
        "sys": _Sys("sys"),
        "io": _module("io", io, " ".join(vars(io)), open=open_, FileIO=file_io),
        "fnmatch": fnmatch,
        "stat": stat,
    }
    found["traceback"] = _module(
        "traceback",
        traceback,
        format_exc=_format_exc,
        print_exc=lambda: this().complain(traceback.format_exc()),
    )
    found["secrets"] = _module("secrets", secrets, token_hex=lambda size=32: process_calls.urandom(size).hex())
    found["queue"] = _with_ours(queue, threading=THREADING, time=TIME)
    found["shutil"] = _with_ours(shutil, os=OS, fnmatch=fnmatch, sys=found["sys"])
    found["glob"] = _with_ours(glob, os=OS, fnmatch=fnmatch)
    return found


MODULES = _make_all()
__all__ = ["MODULES", "Channel", "Killed", "open_"]
