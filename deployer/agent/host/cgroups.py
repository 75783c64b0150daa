"""The limits of this process's control groups: what a container or a session may use of its machine.

Stdlib only, Python 3.8, Linux.
"""

import os
from typing import Iterator, List, NamedTuple, Optional, Tuple

from .files import read_text

_UNLIMITED = 1 << 60
"""Version 1 says "no limit" by a number near 2**63."""


class Limits(NamedTuple):
    """None: no limit."""

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
