"""Processes of this host by pid *and* start time, and how to end all of a job's.

Nothing here signals a bare pid: a pid alone may by now belong to somebody else.
Stdlib only, Python 3.8, Linux.
"""

import os
import signal
import sys
import time
from typing import Callable, Dict, Iterable, List, NamedTuple, Optional, Sequence, Set, Tuple

from .layout import AGENT_DIR, JOB_ID_ENV, RUN_DIR_ENV, SUPERVISOR_ENV, Job

SETTLE_S = 0.5
"""How long leftovers of a job that has ended may take to go by themselves before they count as left over."""
SWEEP_S = 5.0
"""What a job left running gets so long after TERM; after a stop, what is left of the grace."""
KILL_S = 5.0
"""How long a killed process may take to disappear before it is reported as remaining."""
_POLL_S = 0.02

_BYTECODE = os.path.join(AGENT_DIR, "bytecode.py")
_BOOT = (
    "import os, sys; os.nice(int(sys.argv[1])); exec(open(sys.argv[2], encoding='utf-8').read()); enter(sys.argv[3]); "
    "from importlib import import_module; import_module(sys.argv[4]).main(*sys.argv[5:])"
)


def own_process_argv(module: str, *args: str, options: Sequence[str] = (), nice: int = 0) -> List[str]:
    """The command that runs `main(*args)` of one of this package's modules in a Python of its own."""
    importable_from = os.path.abspath(__file__)
    for _ in __name__.split("."):
        importable_from = os.path.dirname(importable_from)
    return [sys.executable, "-I", "-S", *options, "-c", _BOOT, str(nice), _BYTECODE, importable_from, module, *args]


class Process(NamedTuple):
    pid: int
    start_time: int  # clock ticks since boot, field 22 of /proc/PID/stat


class Stat(NamedTuple):
    state: str  # one letter: R, S, D, Z ...
    parent: int
    start_time: int
    group: int = 0


def read_stat(pid: int) -> Optional[Stat]:
    """None when there is no such process. A zombie still has a stat."""
    try:
        with open("/proc/%d/stat" % pid, "rb") as f:
            text = f.read()
    except OSError:
        return None
    fields = text[text.rindex(b")") + 2 :].split()  # the name before it may hold spaces and brackets
    return Stat(fields[0].decode("ascii"), int(fields[1]), int(fields[19]), int(fields[2]))


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


def describe(process: Process) -> Dict[str, object]:
    """A process that would not go, for a report: `state` is D for one that the kernel holds in a call."""
    stat = read_stat(process.pid)
    return {"pid": process.pid, "cmdline": command_of(process.pid), "state": stat.state if stat else "?"}


# --- which are a job's -----------------------------------------------------------------------------------------------


def job_processes(job: Job, *, supervisor: int = 0) -> List[Process]:
    """The job's running processes, without this one and the supervisor, and without those of a job that it launched.

    They are told by the job's marks in their environment, by descent from a marked one or from `supervisor` (0: none),
    which finds those that changed their environment, and by writing into the job's logs, which finds those whose
    supervisor and parents are gone as well.
    """
    stats = _all_stats()
    marks = {pid: _mark_of(pid, job) for pid in stats}
    ours = {pid for pid, mark in marks.items() if mark == _OURS}
    found = _descendants(ours | {supervisor}, stats, without={pid for pid, mark in marks.items() if mark == _OTHERS})
    found = (found | ours) - {os.getpid(), supervisor}
    return [Process(pid, stats[pid].start_time) for pid in sorted(found) if stats[pid].state not in "ZXx"]


_OURS, _OTHERS = "ours", "others"


def _mark_of(pid: int, job: Job) -> Optional[str]:
    """_OURS, _OTHERS (another job's process or supervisor), or None when nothing tells."""
    if not _may_be_ours(pid):
        return None
    try:
        with open("/proc/%d/environ" % pid, "rb") as f:
            env = dict(entry.partition(b"=")[::2] for entry in f.read().split(b"\0"))
    except OSError:  # gone, or not ours to read
        return None
    supervised = env.get(os.fsencode(SUPERVISOR_ENV))
    if supervised is not None:
        return None if _same_path(supervised, job.path) else _OTHERS
    folder = env.get(os.fsencode(RUN_DIR_ENV))
    if folder is not None and not _same_path(folder, job.path):
        return _OTHERS
    return _OURS if env.get(os.fsencode(JOB_ID_ENV)) == os.fsencode(job.id) or _writes_logs(pid, job) else None


def _may_be_ours(pid: int) -> bool:
    try:
        return os.getuid() in (0, os.stat("/proc/%d" % pid).st_uid)
    except OSError:
        return False


def _same_path(one: bytes, other: str) -> bool:
    return one == os.fsencode(other) or os.path.realpath(one) == os.path.realpath(os.fsencode(other))


def _writes_logs(pid: int, job: Job) -> bool:
    """Whether stdout or stderr is a file in the job's log folder."""
    for fd in (1, 2):
        try:
            target = os.readlink("/proc/%d/fd/%d" % (pid, fd))
        except OSError:
            continue
        if target.startswith(os.path.join(os.path.realpath(job.path), "logs", "")):
            return True
    return False


def _all_stats() -> Dict[int, Stat]:
    stats = {int(name): read_stat(int(name)) for name in os.listdir("/proc") if name.isdigit()}
    return {pid: stat for pid, stat in stats.items() if stat is not None}


def _descendants(ancestors: Set[int], stats: Dict[int, Stat], *, without: Set[int]) -> Set[int]:
    children: Dict[int, List[int]] = {}
    for pid, stat in stats.items():
        children.setdefault(stat.parent, []).append(pid)
    found: Set[int] = set()
    queue = [pid for pid in ancestors if pid]
    while queue:
        new = [pid for pid in children.get(queue.pop(), []) if pid not in found and pid not in without]
        found.update(new)
        queue.extend(new)
    return found


# --- how they end ----------------------------------------------------------------------------------------------------


class Subreaper(NamedTuple):
    """The process that all orphans of a job come to."""

    job: Job
    reap: Callable[[], None]  # takes ended children away


def end_all(
    find: Callable[[], List[Process]],
    *,
    term_s: float,
    settle_s: float = SETTLE_S,
    subreaper: Optional[Subreaper] = None,
) -> Tuple[Set[Process], List[Process]]:
    """Ends whatever `find` still finds: `settle_s` to go by itself, TERM, `term_s`, KILL. `subreaper`: see `kill_all`.
    Returns who had to be told, and who remains all the same."""

    def find_all() -> List[Process]:
        return find() or own_children(subreaper)

    told: Set[Process] = set()
    left = _wait_for_none(find_all, settle_s)
    deadline = time.monotonic() + term_s
    while left and time.monotonic() < deadline:
        for process in set(left) - told:  # also those that were forked meanwhile
            send(process, signal.SIGTERM)
            send(process, signal.SIGCONT)  # a stopped one would hear it only then
        told.update(left)
        left = _wait_for_none(find_all, min(0.2, max(0.0, deadline - time.monotonic())))
    told.update(left)
    deadline = time.monotonic() + KILL_S
    while left and time.monotonic() < deadline:
        told.update(kill_all(find, subreaper=subreaper))
        left = _wait_for_none(find_all, min(0.2, max(0.0, deadline - time.monotonic())))
    return told, left


def kill_all(find: Callable[[], List[Process]], *, subreaper: Optional[Subreaper] = None) -> Set[Process]:
    """Kills what `find` finds, and what that forks meanwhile: all are halted first, and a process group that is wholly
    theirs hears it as one, so that nobody who is told late can start another. Returns who was told.

    `subreaper` is given when this process is the job's.
    """
    told: Set[Process] = set()
    for _ in range(_ROUNDS):
        new = set(find()) - told
        if not new:
            break
        _send_all(new, signal.SIGSTOP)
        told |= new
    found = set(find())
    _send_all(found, signal.SIGKILL)
    for _ in range(_CHILDREN_ROUNDS):
        children = own_children(subreaper)
        for process in children:
            send(process, signal.SIGKILL)
        if not children:
            break
    return told | found


_ROUNDS = 20
"""How often those that were forked meanwhile are looked for before the first is killed."""
_CHILDREN_ROUNDS = 200


def own_children(subreaper: Optional[Subreaper]) -> List[Process]:
    """The job's processes among the children of this one, which is its subreaper; none when it is not.

    An orphan that forks and ends over and over comes to its subreaper each time, and is gone again before a look at all
    processes is over: only the kernel's own word that there is no child proves that it has ended.
    """
    for _ in range(_CHILDREN_ROUNDS if subreaper is not None else 0):
        assert subreaper is not None
        subreaper.reap()
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            with open("/proc/self/task/%d/children" % os.getpid()) as f:
                pids = [int(pid) for pid in f.read().split()]
        except (ChildProcessError, FileNotFoundError):  # no child; a kernel without this file
            break
        running = [process for process in map(process_of, pids) if is_running(process)]
        ours = [process for process in running if _mark_of(process.pid, subreaper.job) != _OTHERS]
        if ours:
            return ours
    return []


def _send_all(processes: Iterable[Process], signum: int) -> None:
    meant = {process.pid for process in processes}
    groups: Dict[int, Set[int]] = {}
    for pid, stat in _all_stats().items():
        groups.setdefault(stat.group, set()).add(pid)
    for group, members in groups.items():
        if members <= meant and group != os.getpgrp():
            try:
                os.killpg(group, signum)
            except (ProcessLookupError, PermissionError):
                pass
    for process in processes:
        send(process, signum)


def _wait_for_none(find: Callable[[], List[Process]], wait_s: float) -> List[Process]:
    deadline = time.monotonic() + wait_s
    while True:
        left = find()
        if not left or time.monotonic() >= deadline:
            return left
        time.sleep(_POLL_S)
