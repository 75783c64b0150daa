"""This process's control groups: what a container or a session may use of its machine, and whether the kernel killed a
process that took more memory.

Stdlib only, Python 3.8, Linux.
"""

import os
import time
from typing import Iterator, List, NamedTuple, Optional, Tuple

from .files import read_text

_UNLIMITED = 1 << 60
"""Version 1 says "no limit" by a number near 2**63."""


class Limits(NamedTuple):
    """None means no limit."""

    memory_bytes: Optional[int]
    cpus: Optional[float]
    pids: Optional[int]
    pids_used: int


def read_limits(mount: str = "/sys/fs/cgroup", own: str = "/proc/self/cgroup") -> Limits:
    """The tightest limits from this process's groups up to the root, of cgroup version 2 or 1."""
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
    """How often a process or thread was not started because of a limit of these groups."""
    refused = 0
    for folder in _folders(mount, read_text(own)):
        for line in read_text(os.path.join(folder, "pids.events")).splitlines():
            name, _, value = line.partition(" ")
            refused += int(value) if name == "max" and value.strip().isdigit() else 0
    return refused


def _folders(mount: str, own: str) -> Iterator[str]:
    """Folders of /proc/self/cgroup's groups ("0::/user.slice/x", "4:memory:/docker/y") and of those above them.

    In a container the path may be the host's, which is not seen there; the walk ends at the mount, the container's own.
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
    """How many processes the kernel has killed for lack of memory, None where it does not tell."""

    cgroup: Optional[int]  # in this process's control group and below
    host: Optional[int]


def has_killed(before: OomKills, after: OomKills) -> bool:
    """Whether a process was killed between two looks: in the own control group where it counts, else on the host."""
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
    """Where the counter of the own control group may lie, the likeliest first. A container's own group is the root of
    what it sees, whatever /proc says."""
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
    """Knows the counters as they were shortly before now: an old kill of somebody else's must not be taken for ours."""

    REASON = "the kernel ended it: out of memory"
    HINT = (
        "lower what the ranks hold in the host's memory (data, data-loader workers, several ranks loading one model); "
        "a container's memory limit counts, and so does /dev/shm"
    )

    def __init__(self) -> None:
        self._samples = [read_oom_kills()] * 2
        self._next = time.monotonic() + SAMPLE_S

    def sample(self) -> None:
        """Called often while all goes well."""
        if time.monotonic() >= self._next:
            self._samples = [self._samples[1], read_oom_kills()]
            self._next = time.monotonic() + SAMPLE_S

    def has_killed(self) -> bool:
        """Whether the kernel has killed since 5 to 10 s before the last `sample`."""
        return has_killed(self._samples[0], read_oom_kills())
