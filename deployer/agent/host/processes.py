"""Processes of this host by pid *and* start time.

Nothing here signals a bare pid: a pid alone may by now belong to somebody else.
Stdlib only, Python 3.8, Linux.
"""

import os
import sys
from typing import Callable, Dict, List, NamedTuple, NoReturn, Optional, Sequence

from .layout import AGENT_DIR

_BYTECODE = os.path.join(AGENT_DIR, "bytecode.py")
_BOOT = (
    "import os, sys; os.nice(int(sys.argv[1])); exec(open(sys.argv[2], encoding='utf-8').read()); enter(sys.argv[3]); "
    "from importlib import import_module; import_module(sys.argv[4]).main(*sys.argv[5:])"
)


def own_process_argv(module: str, *args: str, options: Sequence[str] = (), nice: int = 0) -> List[str]:
    """The command that runs `main(*args)` of one of this package's modules in a separate Python."""
    importable_from = os.path.abspath(__file__)
    for _ in __name__.split("."):
        importable_from = os.path.dirname(importable_from)
    python = [sys.executable, "-I", "-S", "-X", "utf8", *options]
    return [*python, "-c", _BOOT, str(nice), _BYTECODE, importable_from, module, *args]


def start_copy(body: Callable[[], NoReturn]) -> int:
    """The pid of a child that is a copy of this process and does `body`, which ends it."""
    pid = os.fork()
    if pid == 0:
        try:
            body()
        finally:
            os._exit(1)
    return pid


class Process(NamedTuple):
    pid: int
    start_time: int  # clock ticks since boot, field 22 of /proc/PID/stat


class Stat(NamedTuple):
    state: str  # one letter: R, S, D, Z ...
    parent: int
    start_time: int
    group: int = 0
    session: int = 0


def read_stat(pid: int) -> Optional[Stat]:
    """None when there is no such process. A zombie still has a stat."""
    try:
        with open("/proc/%d/stat" % pid, "rb") as f:
            text = f.read()
    except OSError:
        return None
    fields = text[text.rindex(b")") + 2 :].split()  # the name before it may hold spaces and brackets
    return Stat(fields[0].decode("ascii"), int(fields[1]), int(fields[19]), int(fields[2]), int(fields[3]))


def all_stats() -> Dict[int, Stat]:
    """Every process that is seen here, zombies too."""
    stats = {int(name): read_stat(int(name)) for name in os.listdir("/proc") if name.isdigit()}
    return {pid: stat for pid, stat in stats.items() if stat is not None}


def process_of(pid: int) -> Process:
    """The process with its start time; 0 when it has gone and been reaped already."""
    stat = read_stat(pid)
    return Process(pid, stat.start_time if stat else 0)


def is_running(process: Process) -> bool:
    """False for an ended process, a zombie, and another process that got the same pid later."""
    stat = read_stat(process.pid)
    return stat is not None and stat.start_time == process.start_time and stat.state not in "ZXx"


def send(process: Process, signum: int, *, group: bool = False) -> bool:
    """Signals the process if it still is the one meant; with `group` its process group too, when it leads one."""
    if not is_running(process):
        return False
    try:
        if group and os.getpgid(process.pid) == process.pid:
            os.killpg(process.pid, signum)
        else:
            os.kill(process.pid, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def command_of(pid: int) -> str:
    """The command line for a report, at most 200 characters; the bare name when the process hides it."""
    for name in ("cmdline", "comm"):
        try:
            with open("/proc/%d/%s" % (pid, name), "rb") as f:
                text = f.read(4096).replace(b"\0", b" ").decode("utf-8", "replace").strip()
        except OSError:
            continue
        if text:
            return text[:200]
    return "?"


class Survivor(NamedTuple):
    """A process that would not go, for a report."""

    pid: int
    start_time: int
    cmdline: str = "?"
    state: str = "?"
    """As in Stat; D for one that the kernel holds in a call."""
    uid: Optional[int] = None
    """Of one that became another user's."""


def describe(process: Process) -> Survivor:
    stat, uid = read_stat(process.pid), uid_of(process.pid)
    state = stat.state if stat else "?"
    return Survivor(*process, command_of(process.pid), state, None if uid == os.getuid() else uid)


def still_there(survivors: Sequence[Survivor]) -> List[Process]:
    """Those that still run. One that became another user's is known by this alone once its parents are gone: its
    environment is not ours to read."""
    return [process for process in (Process(s.pid, s.start_time) for s in survivors) if is_running(process)]


def user_name(uid: int) -> str:
    """The account's name; its number when it has none here."""
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def uid_of(pid: int) -> Optional[int]:
    """The real user of a process; None when it has gone."""
    try:
        with open("/proc/%d/status" % pid, "rb") as f:
            return next(int(line.split()[1]) for line in f if line.startswith(b"Uid:"))
    except (OSError, StopIteration):
        return None
