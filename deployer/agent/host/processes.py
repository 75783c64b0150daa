"""Processes of this host by PID *and* start time.

No signal is sent to a bare PID: it may belong to another process by then.
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
    """The PID of a child that is a copy of this process and runs `body`, which ends it."""
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
    """The stat of a process; None if there is no such process. A zombie still has one."""
    try:
        with open("/proc/%d/stat" % pid, "rb") as f:
            text = f.read()
    except OSError:
        return None
    fields = text[text.rindex(b")") + 2 :].split()  # the name before it may hold spaces and brackets
    return Stat(fields[0].decode("ascii"), int(fields[1]), int(fields[19]), int(fields[2]), int(fields[3]))


def all_stats() -> Dict[int, Stat]:
    """Every visible process, including zombies."""
    stats = {int(name): read_stat(int(name)) for name in os.listdir("/proc") if name.isdigit()}
    return {pid: stat for pid, stat in stats.items() if stat is not None}


def process_of(pid: int) -> Process:
    """The process with its start time; 0 if it is gone."""
    stat = read_stat(pid)
    return Process(pid, stat.start_time if stat else 0)


def is_running(process: Process) -> bool:
    """False for an ended process, a zombie, and another process that got the same PID later."""
    stat = read_stat(process.pid)
    return stat is not None and stat.start_time == process.start_time and stat.state not in "ZXx"


def send(process: Process, signum: int, *, group: bool = False) -> bool:
    """Sends a signal if this is still the same process; with `group`, also to its process group if it leads one."""
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
    """The command line for a report, at most 200 characters; only the name if the process hides it."""
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
    """A process that could not be ended, for a report."""

    pid: int
    start_time: int
    cmdline: str = "?"
    state: str = "?"
    """As in Stat; D if the kernel blocks it in a call."""
    uid: Optional[int] = None
    """The user, if it became another user's process."""


def describe(process: Process) -> Survivor:
    stat, uid = read_stat(process.pid), uid_of(process.pid)
    state = stat.state if stat else "?"
    return Survivor(*process, command_of(process.pid), state, None if uid == os.getuid() else uid)


def still_there(survivors: Sequence[Survivor]) -> List[Process]:
    """Those that still run. A process that became another user's is known only from this list once its parents are
    gone: we may not read its environment."""
    return [process for process in (Process(s.pid, s.start_time) for s in survivors) if is_running(process)]


def user_name(uid: int) -> str:
    """The account's name, or its number if it has no name here."""
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def uid_of(pid: int) -> Optional[int]:
    """The real user of a process; None if it is gone."""
    try:
        with open("/proc/%d/status" % pid, "rb") as f:
            return next(int(line.split()[1]) for line in f if line.startswith(b"Uid:"))
    except (OSError, StopIteration):
        return None
