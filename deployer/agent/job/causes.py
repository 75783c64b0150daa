"""Finds why an attempt failed: compares the job's last log lines with the host's state at that time.

Pure. Stdlib only, Python 3.8: this package runs on the host.
"""

import re
import signal
from typing import Iterator, List, NamedTuple, Optional, Sequence, Tuple

from .host_resources import FileSystemUsage, HostResources, Limits

FULL_BYTES = 1 << 20
"""A file system with less free space counts as full, because the last, larger write failed."""
MOST = 4
"""Maximum number of causes that are reported for a failure."""
LINE = 300
"""Maximum characters of each."""


class Cause(NamedTuple):
    line: str
    hint: str = ""


class FailureContext(NamedTuple):
    """A failed attempt, and its host before and after. `words`: the job's last log lines."""

    words: str
    now: HostResources
    start: Optional[HostResources] = None
    """None if the attempt was never started."""
    signal: Optional[int] = None
    oom: bool = False
    """The kernel has killed a process for lack of memory, and the verdict does not contain this yet."""
    oom_hint: str = ""


def find_causes(failure: FailureContext) -> Tuple[Cause, ...]:
    """At most MOST causes; first those for which the job's log lines and the host's facts agree."""
    found: List[Cause] = []
    for examine in (_disks, _oom, _gpus, _open_files, _processes, _memory, _sizes):
        found += examine(failure)
    short = [Cause(cause.line[:LINE], cause.hint) for cause in dict.fromkeys(found)]
    return tuple(short[:MOST])


def named_files(words: str) -> Tuple[str, ...]:
    """The absolute paths in lines that report a file system's error."""
    lines = [line for line in words.splitlines() if _NO_ROOM.search(line) or _REFUSED.search(line)]
    paths = ["".join(groups) for line in lines for groups in _PATH.findall(line)]
    return tuple(dict.fromkeys(path for path in paths if len(path) > 1))[:4]


# --- disks ------------------------------------------------------------------------------------------------------------

_NO_ROOM = re.compile(
    r"No space left on device|\[Errno 28\][^:\n]{0,60}|ENOSPC|not enough (?:disk )?space", re.IGNORECASE
)
_REFUSED = re.compile(
    r"(Disk quota exceeded|Read-only file system|Input/output error|Stale (?:NFS )?file handle)", re.IGNORECASE
)
_PATH = re.compile(r"'(/[^'\n]+)'|\"(/[^\"\n]+)\"|(?:^|[\s:=(])(/[^\s'\":,;)]+)")
_MAKE_ROOM = "make room there, or use another disk: --remote-root DIR for the job, --env TMPDIR=DIR, --env HF_HOME=DIR"
_SHM = "docker run --shm-size=8g, or --ipc=host, gives more"


def _disks(failure: FailureContext) -> Iterator[Cause]:
    said = _NO_ROOM.search(failure.words)
    before = {fs.path: fs for fs in failure.start.file_systems} if failure.start else {}
    told = False
    for fs in failure.now.file_systems:
        lack = _lack(fs)
        was = before.get(fs.path)
        if lack and (said or (was is not None and not _lack(was))):
            told = True
            head = '"%s": ' % said.group() if said else ""
            yield Cause("%sthe file system of %s %s" % (head, _where(fs), lack), _hint(fs))
        if fs.read_only and was is not None and not was.read_only:
            told = True
            yield Cause("the file system of %s became read-only while it ran" % _where(fs), "look at dmesg there")
    if said and not told and failure.now.file_systems:
        free = "; ".join("%s of %s" % (_size(fs.free_bytes), _where(fs)) for fs in failure.now.file_systems[:3])
        yield Cause('"%s", and when it had ended there were free: %s' % (said.group(), free), _MAKE_ROOM)
    refused = _REFUSED.search(failure.words)
    if refused:
        quota = "quota" in refused.group().lower()
        hint = "ask for a larger quota, or use another disk: --remote-root DIR" if quota else "look at dmesg there"
        yield Cause('"%s" in its last lines: the disk refused a write or a read' % refused.group(), hint)


def _lack(fs: FileSystemUsage) -> str:
    """What was used up, as text; empty if nothing was."""
    least = fs.free_bytes if fs.least_bytes is None else min(fs.least_bytes, fs.free_bytes)
    inodes = [n for n in (fs.inodes_free, fs.least_inodes) if n is not None]
    if fs.free_bytes < FULL_BYTES:
        return "had %s free when it ended" % _size(fs.free_bytes)
    if fs.inodes_free == 0:
        return "had no inode free when it ended (%s of space)" % _size(fs.free_bytes)
    if least < FULL_BYTES:
        return "had only %s free while it ran (%s when it had ended)" % (_size(least), _size(fs.free_bytes))
    return "had no inode free while it ran" if inodes and min(inodes) == 0 else ""


def _where(fs: FileSystemUsage) -> str:
    named = ", ".join(fs.uses[:3])
    return named if fs.path in fs.uses else "%s (%s)" % (named, fs.path)


def _hint(fs: FileSystemUsage) -> str:
    return _SHM if fs.uses[:1] == ("/dev/shm",) else _MAKE_ROOM


# --- memory -----------------------------------------------------------------------------------------------------------

_NO_MEMORY = re.compile(
    r"Cannot allocate memory|\bMemoryError|std::bad_alloc|\[Errno 12\][^:\n]{0,60}|can't allocate memory"
    r"|not enough memory: you tried"
)
_OOM_HINT = "lower what the job holds in memory, or raise the limit; /dev/shm counts"


def _oom(failure: FailureContext) -> Iterator[Cause]:
    if failure.oom:
        line = "the kernel killed a process for lack of memory: %s" % _memory_there(failure.now)
        yield Cause(line, failure.oom_hint or _OOM_HINT)


def _memory(failure: FailureContext) -> Iterator[Cause]:
    said = _NO_MEMORY.search(failure.words)
    if said and not failure.oom:
        there, limits = _memory_there(failure.now), failure.now.limits
        if limits.address_space is not None:
            there += ", and one process may take %s (ulimit -v)" % _size(limits.address_space)
        if limits.commits:
            there += ", and no more than there is may be reserved (vm.overcommit_memory=2)"
        yield Cause('"%s": %s' % (said.group(), there), _OOM_HINT)


def _memory_there(now: HostResources) -> str:
    limit = now.limits.group_memory
    if limit is not None and (not now.memory.total or limit < now.memory.total):
        return "its control group may take %s" % _size(limit)
    return "this host has %s, %s were free when it had ended" % (_size(now.memory.total), _size(now.memory.free))


# --- GPUs -------------------------------------------------------------------------------------------------------------

_CUDA_MEMORY = re.compile(r"CUDA out of memory|OutOfMemoryError|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation")


def _gpus(failure: FailureContext) -> Iterator[Cause]:
    gpus = failure.now.gpus
    reboot = "reset or reboot the host: deploy.py doctor says more"
    if gpus.gone:
        yield Cause("nvidia-smi shows no GPU %s any more: it has fallen off" % ", ".join(gpus.gone), reboot)
    if gpus.driver:
        yield Cause("the GPU driver does not answer: %s" % gpus.driver, reboot)
    for fault in gpus.faults:
        yield Cause("a GPU has failed: %s" % fault, reboot)
    said = _CUDA_MEMORY.search(failure.words)
    if said and gpus.others:
        hint = "choose a GPU that nobody uses with --gpus auto:N, or wait for it with --queue"
        yield Cause('"%s", and others compute there: %s' % (said.group(), "; ".join(gpus.others)), hint)


# --- limits -----------------------------------------------------------------------------------------------------------

_FILES = re.compile(r"Too many open files(?: in system)?|\[Errno 24\][^:\n]{0,60}|EMFILE")
_FORKS = re.compile(
    r"can't start new thread|[Ff]ork: (?:retry: )?Resource temporarily unavailable|Cannot fork"
    r"|[Tt]hread creation failed|pthread_create failed|BlockingIOError: \[Errno 11\] Resource temporarily unavailable"
)


def _open_files(failure: FailureContext) -> Iterator[Cause]:
    said = _FILES.search(failure.words)
    limit = failure.now.limits.open_files
    if said and limit is not None:
        hint = "raise it for the account (limits.conf, docker run --ulimit nofile=65536), or keep fewer open: workers"
        yield Cause('"%s": one process may have %d open here (ulimit -n)' % (said.group(), limit), hint)


def _processes(failure: FailureContext) -> Iterator[Cause]:
    said, limits = _FORKS.search(failure.words), failure.now.limits
    before = failure.start.limits.forks_refused if failure.start else limits.forks_refused
    head = '"%s": ' % said.group() if said else ""
    if limits.forks_refused > before or (said and _is_near(limits)):
        line = "%sits control group may have %s processes and threads" % (head, limits.group_processes)
        yield Cause(line, "docker run --pids-limit=-1, or TasksMax= of the systemd unit; fewer workers need fewer")
    elif said and limits.processes is not None:
        line = "%sthis account may have %d processes and threads (ulimit -u)" % (head, limits.processes)
        yield Cause(line, "raise it (limits.conf), or start fewer: data-loader workers, OMP_NUM_THREADS")


def _is_near(limits: Limits) -> bool:
    return limits.group_processes is not None and limits.group_processes - limits.group_used < 64


def _sizes(failure: FailureContext) -> Iterator[Cause]:
    limits = failure.now.limits
    if failure.signal == signal.SIGXFSZ or "File too large" in failure.words:
        most = "no limit of this account" if limits.file_bytes is None else "%s (ulimit -f)" % _size(limits.file_bytes)
        yield Cause("a file became larger than it may: %s" % most, "raise it: limits.conf")
    if failure.signal == signal.SIGXCPU and limits.cpu_s is not None:
        yield Cause("one process may compute for %d s here (ulimit -t)" % limits.cpu_s, "raise it: limits.conf")


def _size(count: int) -> str:
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            return "%.1f %s" % (count / factor, unit)
    return "%d bytes" % count


def first_hint(causes: Sequence[Cause]) -> str:
    return next((cause.hint for cause in causes if cause.hint), "")
