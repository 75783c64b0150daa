"""Ends all processes of a job: TERM first, then halts and kills all together, including those that they fork.

Stdlib only, Python 3.8, Linux.
"""

import os
import signal
import time
from typing import Callable, Collection, Dict, Iterable, List, NamedTuple, Optional, Set, Tuple

from .layout import Job
from .marks import is_of_another_job
from .processes import Process, all_stats, is_running, process_of, send

SETTLE_S = 0.5
"""Seconds for the remaining processes of an ended job to end before they count as left over."""
SWEEP_S = 5.0
"""Seconds between TERM and KILL for processes that a job left running; after a stop, the rest of the grace period."""
KILL_S = 5.0
"""Seconds for a killed process to disappear before it is reported as remaining."""
_POLL_S = 0.02
_HALT_ROUNDS = 20
"""How often newly forked processes are searched before the first is killed."""
_CHILDREN_ROUNDS = 200
"""The same for children of the subreaper, which are found much faster."""


class Subreaper(NamedTuple):
    """The process that becomes the parent of all orphans of a job."""

    job: Job
    reap: Callable[[], None]  # takes ended children away
    apart: Collection[Process] = ()  # children that are none of the job's: one that is ending shows no mark any more


def end_all(
    find: Callable[[], List[Process]],
    *,
    term_s: float,
    settle_s: float = SETTLE_S,
    subreaper: Optional[Subreaper] = None,
    seen: Collection[Process] = (),
) -> Tuple[Set[Process], List[Process]]:
    """Ends all processes that `find` returns: waits `settle_s`, sends TERM, waits `term_s`, sends KILL. `subreaper`:
    see `kill_all`. Returns the processes that got a signal and those that remain.

    A process that was found once, now or in `seen`, counts as the job's until it has ended, because it cannot be
    recognised once its parents are gone.
    """
    told: Set[Process] = set()

    def find_all() -> List[Process]:
        found = find() or own_children(subreaper)
        return [*found, *(p for p in {*told, *seen}.difference(found) if is_running(p))]

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
    """Halts and then kills all processes that `find` returns, and those that they fork while this runs. A process group
    that contains only such processes gets one signal, so that no member can fork in between. Returns the processes that
    got a signal.

    `subreaper`: given if this process is the job's subreaper.
    """
    told: Set[Process] = set()
    for _ in range(_HALT_ROUNDS):
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


def own_children(subreaper: Optional[Subreaper]) -> List[Process]:
    """The job's processes among this process's children, if it is the job's subreaper; otherwise empty.

    An orphan that forks and ends repeatedly becomes the subreaper's child each time, and is gone before all processes
    have been read. Only the kernel's report that there is no child proves that it has ended.
    """
    if subreaper is None:
        return []
    for _ in range(_CHILDREN_ROUNDS):
        subreaper.reap()
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            with open("/proc/self/task/%d/children" % os.getpid()) as f:
                pids = [int(pid) for pid in f.read().split()]
        except (ChildProcessError, FileNotFoundError):  # no child; a kernel without this file
            break
        running = [
            process for process in map(process_of, pids) if is_running(process) and process not in subreaper.apart
        ]
        ours = [process for process in running if not is_of_another_job(process.pid, subreaper.job)]
        if ours:
            return ours
    return []


def _send_all(processes: Iterable[Process], signum: int) -> None:
    meant = {process.pid for process in processes}
    groups: Dict[int, Set[int]] = {}
    for pid, stat in all_stats().items():
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
