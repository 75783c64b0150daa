"""How much room a disk has, and what it refused, as the error that the client shows.

Stdlib only, Python 3.8: this package runs on the host.
"""

import os
from typing import NoReturn

from .errors import AgentError


def free_bytes(path: str) -> int:
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def megabytes(size: int) -> str:
    return "%.1f MB" % (size / 1e6)


def no_room(path: str, why: str, free: int) -> AgentError:
    return AgentError(
        "host",
        "no room below %s: %s, %s are free" % (path, why, megabytes(free)),
        "free some space on the host, or choose another folder there with --remote-root DIR",
    )


def fail(path: str, error: OSError) -> NoReturn:
    """Raises the AgentError for what a file system refused: which path, why, how much is free, what to do."""
    folder = path
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder) or "/"
    try:
        status = os.statvfs(folder)
        room = ", %s are free there" % megabytes(status.f_bavail * status.f_frsize)
        if status.f_files and not status.f_favail:
            room += ", but no inode"
    except OSError:
        room = ""
    raise AgentError(
        "host",
        "cannot write %s: %s%s" % (path, error.strerror or error, room),
        "free some space or the right to write there, or choose another folder with --remote-root DIR",
    )
