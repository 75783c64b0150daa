"""Whether this node holds torch's store, through which the ranks find each other: for the message when it is lost."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

LISTENS = "0A"
"""The state of a listening socket in /proc/net/tcp."""
GENERATIONS = 4
"""This process, its wrapper, torchrun's agent, and one more."""


def holds_store(env: Mapping[str, str]) -> bool:
    """Whether this process or one that it descends from listens on the store's port. Linux only; False elsewhere."""
    port = env.get("MASTER_PORT", "")
    if not port.isdigit():
        return False
    sockets, pid = listening(int(port)), os.getpid()
    for _ in range(GENERATIONS):
        if not sockets or pid <= 1:
            return False
        if sockets & open_sockets(pid):
            return True
        pid = parent_of(pid)
    return False


def listening(port: int) -> set[str]:
    """The inodes of the sockets that listen on a port, on any address."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError, ValueError, IndexError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                    found.add(fields[9])
    return found


def open_sockets(pid: int) -> set[str]:
    """The inodes of a process's sockets; empty if it belongs to somebody else."""
    found = set()
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                target = str(entry.readlink())
                if target.startswith("socket:["):
                    found.add(target[len("socket:[") : -1])
    return found


def parent_of(pid: int) -> int:
    with suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0
