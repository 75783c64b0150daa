"""Processes of this host by pid *and* start time, and how to end all of a job's.

Nothing here signals a bare pid: a pid alone may by now belong to somebody else.
Stdlib only, Python 3.8, Linux.
"""

import os
import signal
import time
from typing import Callable, Dict, List, NamedTuple, Optional, Set, Tuple

SETTLE_S = 0.5
"""How long leftovers of a job that has ended may take to go by themselves before they count as left over."""
KILL_S = 5.0
"""How long a killed process may take to disappear before it is reported as remaining."""
_POLL_S = 0.02


class Process(NamedTuple):
    pid: int
    start_time: int  # clock ticks since boot, field 22 of /proc/PID/stat


class Stat(NamedTuple):
    state: str  # one letter: R, S, D, Z ...
    parent: int
    start_time: int


def read_stat(pid: int) -> Optional[Stat]:
    """None when there is no such process. A zombie still has a stat."""
    try:
        with open("/proc/%d/stat" % pid, "rb") as f:
            text = f.read()
    except OSError:
        return None
    fields = text[text.rindex(b")") + 2 :].split()  # the name before it may hold spaces and brackets
    return Stat(fields[0].decode("ascii"), int(fields[1]), int(fields[19]))


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


def job_processes(marker: str, *, supervisor: int = 0) -> List[Process]:
    """This user's running processes whose environment holds `marker` ("NAME=value"), and all descendants of
    `supervisor` (0: none), which finds those that changed their environment. Without this process and it."""
    stats = _all_stats()
    found = _descendants(supervisor, stats) if supervisor else set()
    entry = os.fsencode(marker)
    found.update(pid for pid in stats if pid not in found and _has_marker(pid, entry))
    found -= {os.getpid(), supervisor}
    return [Process(pid, stats[pid].start_time) for pid in sorted(found) if stats[pid].state not in "ZXx"]


def _all_stats() -> Dict[int, Stat]:
    stats = {int(name): read_stat(int(name)) for name in os.listdir("/proc") if name.isdigit()}
    return {pid: stat for pid, stat in stats.items() if stat is not None}


def _descendants(ancestor: int, stats: Dict[int, Stat]) -> Set[int]:
    children: Dict[int, List[int]] = {}
    for pid, stat in stats.items():
        children.setdefault(stat.parent, []).append(pid)
    found: Set[int] = set()
    queue = [ancestor]
    while queue:
        new = [pid for pid in children.get(queue.pop(), []) if pid not in found]
        found.update(new)
        queue.extend(new)
    return found


def _has_marker(pid: int, entry: bytes) -> bool:
    try:
        if os.stat("/proc/%d" % pid).st_uid != os.getuid():
            return False
        with open("/proc/%d/environ" % pid, "rb") as f:
            return entry in f.read().split(b"\0")
    except OSError:  # gone, or not ours to read
        return False


def end_all(find: Callable[[], List[Process]], *, term_s: float, idle: Callable[[], None]) -> Tuple[int, List[Process]]:
    """Ends whatever `find` still finds: SETTLE_S to go by itself, TERM, `term_s`, KILL. `idle` is called while waiting
    (it reaps). Returns how many had to be told, and which remain all the same."""
    told: Set[Process] = set()
    left = _wait_for_none(find, SETTLE_S, idle)
    for signum, wait_s in ((signal.SIGTERM, term_s), (signal.SIGKILL, KILL_S)):
        deadline = time.monotonic() + wait_s
        signalled: Set[Process] = set()
        while left:
            for process in set(left) - signalled:  # also those that were forked meanwhile
                send(process, signum)
                signalled.add(process)
            told.update(left)
            if time.monotonic() >= deadline:
                break
            left = _wait_for_none(find, min(0.2, max(0.0, deadline - time.monotonic())), idle)
    return len(told), left


def _wait_for_none(find: Callable[[], List[Process]], wait_s: float, idle: Callable[[], None]) -> List[Process]:
    deadline = time.monotonic() + wait_s
    while True:
        idle()
        left = find()
        if not left or time.monotonic() >= deadline:
            return left
        time.sleep(_POLL_S)
