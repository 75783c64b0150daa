"""A host's file systems: which one holds a path, its free space, and its errors as the client shows them.

Stdlib only, Python 3.8: this package runs on the host.
"""

import errno
import os
from typing import List, NamedTuple, NoReturn, Sequence, Tuple

from .errors import AgentError
from .files import read_text

NETWORK_KINDS = (
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "fuse.sshfs",
    "lustre",
    "beegfs",
    "gpfs",
    "ceph",
    "fuse.glusterfs",
    "9p",
)
"""File systems that another machine serves."""


class Disk(NamedTuple):
    """The file system under a folder."""

    path: str
    kind: str  # as in /proc/mounts, "" when it is not known
    options: Sequence[str]  # of the mount
    size_bytes: int
    free_bytes: int
    inodes: int  # 0 where the file system has no fixed number
    inodes_free: int


def read_disk(path: str) -> Disk:
    """The disk of a path, or of the nearest folder above it that exists."""
    folder = existing_folder(path)
    status = os.statvfs(folder)
    kind, options = mount_of(folder, read_text("/proc/mounts"))
    size, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    return Disk(path, kind, options, size, free, status.f_files, status.f_favail)


def mount_of(path: str, mounts: str) -> Tuple[str, List[str]]:
    """Type and options of the file system that holds a path; of two mounts at one place, the later one."""
    path, best = os.path.realpath(path), ("", "", "")
    for line in mounts.splitlines():
        _, where, kind, options = line.split()[:4]
        if (path + "/").startswith(where.rstrip("/") + "/") and len(where) >= len(best[0]):
            best = (where, kind, options)
    return best[1], best[2].split(",")


def existing_folder(path: str) -> str:
    """The path, or the nearest folder above it that exists."""
    while not os.path.isdir(path):
        path = os.path.dirname(path) or "/"
    return path


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


def is_full(error: OSError) -> bool:
    """Whether the disk was full: no space, no inode, or this user's quota."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def room(path: str) -> str:
    """The free space on a path's disk, and what is used up: `3.2 MB are free on /mnt (ext4), and no inode of 100`.
    Empty if it cannot be read."""
    try:
        folder = existing_folder(path)
        status = os.statvfs(folder)
        top = os.path.realpath(folder)
        while not os.path.ismount(top):
            top = os.path.dirname(top)
        kind, _ = mount_of(folder, read_text("/proc/mounts"))
    except OSError:
        return ""
    free = "%s are free on %s (%s)" % (megabytes(status.f_bavail * status.f_frsize), top, kind)
    return free + (", and no inode of %d" % status.f_files if status.f_files and not status.f_favail else "")


def fail(path: str, error: OSError) -> NoReturn:
    """Raises the AgentError for a refused write: which path, why, the free space there, and what to do."""
    free = room(path)
    raise AgentError(
        "host",
        "cannot write %s: %s%s" % (path, error.strerror or error, ", " + free if free else ""),
        "free some space or the right to write there, or choose another folder with --remote-root DIR",
    )
