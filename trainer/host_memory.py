"""The memory and the CPU cores that this process may use."""

from __future__ import annotations

import os
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


def available_bytes(*, proc: Path = Path("/proc"), cgroups: Path = CGROUPS) -> int | None:
    """Bytes of memory still available: the smaller of the system's and the container's; None if neither is known."""
    found = [size for size in (_system(proc), *_limits(proc, cgroups)) if size is not None]
    return min(found) if found else None


def available_cores() -> int:
    """The number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cores_of_rank() -> int:
    """CPU cores for each rank of this node, at least 1."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, available_cores() // max(1, int(ranks) if ranks.isdigit() else 1))


def _system(proc: Path) -> int | None:
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return None


def _limits(proc: Path, cgroups: Path) -> list[int | None]:
    """The bytes left by the limits of this process's control group and of its parents, in both versions of cgroups."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    places = [line.split(":", 2) for line in lines if line.count(":") >= 2]
    return [
        _left(folder, *names)
        for _, controllers, path in places
        if controllers == "" or "memory" in controllers.split(",")
        for root, names in [
            (cgroups, ("memory.max", "memory.current", "inactive_file"))
            if controllers == ""
            else (cgroups / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"))
        ]
        for folder in _upwards(root, path.strip("/"))
    ]


def _upwards(root: Path, path: str) -> list[Path]:
    inside = root / path
    return [folder for folder in (inside, *inside.parents) if folder == root or root in folder.parents]


def _left(folder: Path, limit: str, used: str, cache: str) -> int | None:
    """A group's limit less its use; cache that the kernel can drop does not count as use. None without a limit."""
    try:
        total, taken = int((folder / limit).read_text()), int((folder / used).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return max(0, total - taken + int(stat.get(cache, 0)))
    except (OSError, ValueError):
        return None
