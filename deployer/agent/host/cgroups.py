"""This process's control groups: which limits a container or a session has, and whether the kernel killed a process
that used more memory.

Stdlib only, Python 3.8, Linux.
"""

import os
import time
from typing import Iterator, List, NamedTuple, Optional, Tuple

from .files import read_text

_UNLIMITED = 1 << 60
"""Version 1 writes "no limit" as a number near 2**63."""


class Limits(NamedTuple):
    """None means no limit."""

    memory_bytes: Optional[int]
    cpus: Optional[float]
    pids: Optional[int]
    pids_used: int


def read_limits(mount: str = "/sys/fs/cgroup", own: str = "/proc/self/cgroup") -> Limits:
    """The tightest limits of this process's groups and those above them, of cgroup version 2 or 1."""
    memory: List[int] = []
    cpus: List[float] = []
    pids: List[Tuple[int, int]] = []
    for folder in _folders(mount, read_text(own)):
        memory += _numbers(folder, "memory.max", "memory.limit_in_bytes")
        cpus += _cpus(folder)
        pids += [(limit, sum(_numbers(folder, "pids.current"))) for limit in _numbers(folder, "pids.max")]
    tightest = min(pids, key=lambda pair: pair[0] - pair[1]) if pids else (None, 0)
    return Limits(min(memory, default=None), min(cpus, default=None), *tightest)


def read_refused_forks(mount: str = "/sys/fs/cgroup", own: str = "/proc/self/cgroup") -> int:
    """How often a limit of these groups prevented the start of a process or thread."""
    refused = 0
    for folder in _folders(mount, read_text(own)):
        for line in read_text(os.path.join(folder, "pids.events")).splitlines():
            name, _, value = line.partition(" ")
            refused += int(value) if name == "max" and value.strip().isdigit() else 0
    return refused


def _folders(mount: str, own: str) -> Iterator[str]:
    """Folders of /proc/self/cgroup's groups ("0::/user.slice/x", "4:memory:/docker/y") and of those above them.

    In a container the path may be the host's, which does not exist there; the walk ends at the container's own mount.
    """
    for line in own.splitlines():
        _, controllers, path = line.split(":", 2)
        names = [controllers, *controllers.split(",")] if controllers else ["."]
        for base in [os.path.normpath(os.path.join(mount, name)) for name in names]:
            folder = os.path.normpath(base + path)
            while len(folder) >= len(base):
                yield folder
                folder = os.path.dirname(folder)


def _numbers(folder: str, *names: str) -> List[int]:
    texts = [read_text(os.path.join(folder, name)).strip() for name in names]
    return [int(text) for text in texts if text.isdigit() and int(text) < _UNLIMITED]


def _cpus(folder: str) -> List[float]:
    words = read_text(os.path.join(folder, "cpu.max")).split()
    if len(words) != 2:
        words = [read_text(os.path.join(folder, name)).strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
    return [int(words[0]) / int(words[1])] if all(word.isdigit() for word in words) else []


# --- killed for lack of memory ----------------------------------------------------------------------------------------

SAMPLE_S = 5.0


class OomKills(NamedTuple):
    """How many processes the kernel has killed for lack of memory; None if it does not report it."""

    cgroup: Optional[int]  # in this process's control group and below
    host: Optional[int]


def has_killed(before: OomKills, after: OomKills) -> bool:
    """Whether a process was killed between two samples: in the own control group if it counts kills, else on the
    host."""
    if before.cgroup is not None and after.cgroup is not None:
        return after.cgroup > before.cgroup
    return before.host is not None and after.host is not None and after.host > before.host


def parse_oom_kill(text: str) -> Optional[int]:
    """The count in a file of `name value` lines: /proc/vmstat, memory.events, memory.oom_control."""
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name == "oom_kill" and value.strip().isdigit():
            return int(value)
    return None


def oom_files(proc_self_cgroup: str) -> List[str]:
    """The paths where the own control group's counter may be, the most likely first. A container's own group is the
    root of what it sees, whatever /proc contains."""
    files = []
    for line in proc_self_cgroup.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            base, name = "/sys/fs/cgroup/memory", "memory.oom_control"
        elif number == "0":
            base, name = "/sys/fs/cgroup", "memory.events"
        else:
            continue
        files += [os.path.join(base + path, name), os.path.join(base, name)]
    return files


def read_oom_kills() -> OomKills:
    counts = (parse_oom_kill(read_text(path)) for path in oom_files(read_text("/proc/self/cgroup")))
    return OomKills(next((n for n in counts if n is not None), None), parse_oom_kill(read_text("/proc/vmstat")))


class OomWatch:
    """Keeps the counters of a few seconds ago, so that an older kill of another process is not taken for one of the
    job's."""

    REASON = "the kernel ended it: out of memory"
    HINT = (
        "lower what the ranks hold in the host's memory (data, data-loader workers, several ranks loading one model); "
        "a container's memory limit counts, and so does /dev/shm"
    )

    def __init__(self) -> None:
        self._samples = [read_oom_kills()] * 2
        self._next = time.monotonic() + SAMPLE_S

    def sample(self) -> None:
        """Call it often while the job runs."""
        if time.monotonic() >= self._next:
            self._samples = [self._samples[1], read_oom_kills()]
            self._next = time.monotonic() + SAMPLE_S

    def has_killed(self) -> bool:
        """Whether the kernel has killed since 5 to 10 s before the last `sample`."""
        return has_killed(self._samples[0], read_oom_kills())
