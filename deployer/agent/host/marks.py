"""Finds a job's processes in /proc, whatever the job's files contain.

The marks in a process's environment name its job's folder, and its children inherit them. A process without marks
belongs to the job if it descends from a marked one or from the supervisor (the parent of orphans), if a process of the
job leads its session, if it writes into the job's logs, or if its stdin is the job's lease. A process with another
job's mark belongs to that job, even if this job launched it.

Stdlib only, Python 3.8, Linux.
"""

import os
import re
from typing import Dict, Iterable, List, NamedTuple, Optional, Pattern, Set

from .layout import ATTEMPT_ENV, BESIDE_ENV, GROUP_ENV, JOB_ID, LEASE_NAME, RUN_DIR_ENV, SUPERVISOR_ENV, Job, Root
from .processes import Process, Stat, read_stat

_LOGS = re.compile(r"(/.+/jobs/[^/]+)/logs/attempt_\d+/(?:[^/]+/){0,2}[^/]+\Z")
_OWN_LOG = re.compile(r"(/.+/jobs/[^/]+)/control/[^/]+\Z")  # a supervisor's
_LEASE = re.compile(r".*/(?:[^/]*?-)??" + LEASE_NAME)
_SUPERVISOR_MODULE = b"supervisor.start"
LOOKS = 5
"""How often processes that have started during the reading are searched."""


class JobMark(NamedTuple):
    """The marks in a process's environment."""

    folder: str  # the job's, where it lies by now
    marked: str  # and where it lay when the process was started
    supervises: bool = False
    attempt: int = 1
    group: str = ""  # the folder of its group of processes


class Found(NamedTuple):
    """A job's running processes: its supervisors (usually one), and all others."""

    supervisors: List[Process]
    others: List[Process]
    attempt: int  # of the others, by their marks

    @property
    def all(self) -> List[Process]:
        return [*self.others, *self.supervisors]


class ProcessSnapshot:
    """A snapshot of all processes of this host."""

    def __init__(self) -> None:
        self._stats: Dict[int, Stat] = {}
        self._marks: Dict[int, JobMark] = {}
        self._writers: Dict[int, str] = {}
        self._holders: Dict[str, Set[int]] = {}
        self._read_new()

    def _read_new(self) -> bool:
        """Reads the processes that have started since the last call. Returns whether there were any."""
        listed = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        stats = {pid: read_stat(pid) for pid in listed if pid not in self._stats}
        new = {pid: stat for pid, stat in stats.items() if stat is not None}
        self._stats.update(new)
        for pid in new:
            if _may_be_ours(pid):
                self._note(pid)
        self._moved = {mark.marked: mark.folder for mark in self._marks.values() if mark.marked != mark.folder}
        for pid, mark in self._marks.items():  # also those that do not write into its logs
            self._marks[pid] = mark._replace(folder=self._moved.get(mark.marked, mark.folder))
        return bool(new)

    def _note(self, pid: int) -> None:
        mark = read_mark(pid)
        if mark is not None:
            self._marks[pid] = mark
        else:
            folder = _writes_into(pid, _LOGS)
            if folder is not None:
                self._writers[pid] = folder
        lease = _held_lease(pid)
        if lease is not None:
            self._holders.setdefault(lease, set()).add(pid)

    def of(self, job: Job, *, supervisor: int = 0) -> Found:
        """The job's processes without this one. `supervisor`: a process that is known to be one."""
        for _ in range(LOOKS):
            found = self._of(job, supervisor)
            if found.all or not self._read_new():  # one may have ended before it was read, and left what it started
                break
        return found

    def _of(self, job: Job, supervisor: int) -> Found:
        folder = os.path.realpath(job.path)
        folder = self._moved.get(folder, folder)
        marked = {pid for pid, mark in self._marks.items() if mark.folder == folder}
        foreign = set(self._marks) - marked
        supervising = {pid for pid in marked if self._marks[pid].supervises}
        heads = {pid for pid in supervising if self._stats[pid].parent not in supervising} | ({supervisor} - {0})
        found = marked | {pid for pid, place in self._writers.items() if place == folder}
        found |= self._holders_of(job, folder)
        while True:
            leaders = {pid for pid in found if self._stats[pid].session == pid}
            more = {pid for pid, stat in self._stats.items() if stat.session in leaders and pid not in foreign}
            more |= _descendants(found | heads, self._stats, without=foreign)
            if more <= found:
                break
            found |= more
        attempts = [self._marks[pid].attempt for pid in found & marked - supervising]
        others = found - heads - {os.getpid(), supervisor}
        return Found(self._running(heads - {os.getpid()}), self._running(others), max(attempts, default=1))

    def job_ids(self, root: Root) -> List[str]:
        """Ids of the jobs below this root that have processes."""
        jobs = os.path.realpath(root.jobs)
        places = {mark.folder for mark in self._marks.values()} | set(self._writers.values())
        names = {os.path.basename(place) for place in places if os.path.dirname(place) == jobs}
        return sorted(name for name in names if JOB_ID.match(name))

    def _holders_of(self, job: Job, folder: str) -> Set[int]:
        """The processes that hold the job's GPUs. A lease does not name a root, so this is empty while a job with this
        ID runs under another root."""
        same_id = {m.folder for m in self._marks.values() if os.path.basename(m.folder) == job.id}
        leases = [name for name in self._holders if name == job.id] if same_id <= {folder} else []
        return set().union(*(self._holders[name] for name in leases)) - set(self._marks)

    def _running(self, pids: Iterable[int]) -> List[Process]:
        running = [pid for pid in sorted(pids) if pid in self._stats and self._stats[pid].state not in "ZXx"]
        return [Process(pid, self._stats[pid].start_time) for pid in running]


def job_processes(job: Job, *, supervisor: int = 0) -> List[Process]:
    """The job's running processes, without this one, its supervisors, and those of a job that it launched.

    `supervisor`: a process that is known to be one; 0: none.
    """
    return ProcessSnapshot().of(job, supervisor=supervisor).others


def in_group(processes: Iterable[Process], folder: str) -> List[Process]:
    """The processes of one group of a job; if the job has only one group, which has no folder, all."""
    if not folder:
        return list(processes)
    marked = ((process, read_mark(process.pid)) for process in processes)
    return [process for process, mark in marked if mark is not None and mark.group == folder]


def is_here(process: Process) -> bool:
    """Whether it runs under this host's name: containers that share their processes count as separate hosts."""
    try:
        return os.readlink("/proc/%d/ns/uts" % process.pid) == os.readlink("/proc/self/ns/uts")
    except OSError:
        return True


def is_of_another_job(pid: int, job: Job) -> bool:
    mark = read_mark(pid) if _may_be_ours(pid) else None
    return mark is not None and os.path.realpath(job.path) not in (mark.folder, mark.marked)


def supervises(pid: int, job: Job) -> bool:
    """Whether the process is marked as this job's supervisor."""
    mark = read_mark(pid) if _may_be_ours(pid) else None
    return mark is not None and mark.supervises and os.path.realpath(job.path) in (mark.folder, mark.marked)


def read_mark(pid: int) -> Optional[JobMark]:
    """A process's marks; None if it has none, is gone, or belongs to another user."""
    env = {name: value for name, _, value in (e.partition(b"=") for e in _read("environ", pid).split(b"\0"))}
    folder, supervised = env.get(os.fsencode(RUN_DIR_ENV)), env.get(os.fsencode(SUPERVISOR_ENV))
    if folder is not None and folder == env.get(os.fsencode(BESIDE_ENV)):  # `exec`, or a shell: the user's own
        folder = None
    if not env.keys() - {b""}:  # a kernel that shows no environment: the command line says it too
        words = _read("cmdline", pid).split(b"\0")[:-1]
        supervised = words[-1] if len(words) > 2 and words[-2].endswith(_SUPERVISOR_MODULE) else None
    marked = supervised if supervised and supervised != folder else folder
    if not marked:
        return None
    attempt = env.get(os.fsencode(ATTEMPT_ENV), b"")
    number = int(attempt) if attempt.isdigit() and len(attempt) < 10 else 1
    path = os.path.realpath(os.fsdecode(marked))
    by_logs = _writes_into(pid, _LOGS, _OWN_LOG) or path
    is_moved = os.path.basename(by_logs) == os.path.basename(path)
    group = os.fsdecode(env.get(os.fsencode(GROUP_ENV), b""))
    return JobMark(by_logs if is_moved else path, path, supervises=marked is not folder, attempt=number, group=group)


def _writes_into(pid: int, *logs: "Pattern[str]") -> Optional[str]:
    """The folder of the job whose log is the process's stdout or stderr."""
    matches = [pattern.match(_target(pid, fd)) for fd in (1, 2) for pattern in logs]
    return next((match.group(1) for match in matches if match), None)


def _held_lease(pid: int) -> Optional[str]:
    """The ID of the job whose GPUs this process holds through its stdin. A process that only reads a lease has not
    locked it."""
    job_id = leased_by(_target(pid, 0))
    if job_id is None:
        return None
    lines = [line.split() for line in _read("fdinfo/0", pid).splitlines() if line.startswith(b"lock:")]
    return job_id if any(b"FLOCK" in words and b"WRITE" in words for words in lines) else None


def leased_by(path: str) -> Optional[str]:
    """The ID of the job whose lease this file is, according to its name."""
    match = _LEASE.match(path)
    return match.group(1) if match else None


def _target(pid: int, fd: int) -> str:
    """The path of an open descriptor, even if it was deleted."""
    try:
        target = os.readlink("/proc/%d/fd/%d" % (pid, fd))
    except OSError:
        return ""
    return target[: -len(" (deleted)")] if target.endswith(" (deleted)") else target


def _read(name: str, pid: int) -> bytes:
    try:
        with open("/proc/%d/%s" % (pid, name), "rb") as f:
            return f.read()
    except OSError:
        return b""


def _may_be_ours(pid: int) -> bool:
    try:
        return os.getuid() in (0, os.stat("/proc/%d" % pid).st_uid)
    except OSError:
        return False


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
