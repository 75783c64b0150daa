"""Whether the kernel killed a process for lack of memory: its counters, and what their rise means.

Stdlib only, Python 3.8, Linux.
"""

import os
import time
from typing import List, NamedTuple, Optional

from ..host.files import read_text

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


def cgroup_files(proc_self_cgroup: str) -> List[str]:
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
    counts = (parse_oom_kill(read_text(path)) for path in cgroup_files(read_text("/proc/self/cgroup")))
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
