"""Identifies this machine, its current boot, and a process across machines and boots.

Stdlib only, Python 3.8, Linux.
"""

import errno
import os
from typing import NamedTuple

from .errors import AgentError
from .files import read_whole
from .processes import Process, is_running, process_of

_FOR_GOOD = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ELOOP, errno.EINVAL, errno.EISDIR)
"""Errors that do not go away by trying again."""


class Identity(NamedTuple):
    """Identifies a process: no other one on any machine is equal to it."""

    machine_id: str
    boot_id: str
    pid: int
    start_time: int
    hostname: str


def _read_id(path: str) -> str:
    """Reads an ID; empty if there is none. Raises AgentError if there may be one: without it this would look like
    another host or boot."""
    try:
        return read_whole(path, 4096).decode("utf-8", "replace").strip()
    except OSError as error:
        if error.errno in _FOR_GOOD:
            return ""
        raise AgentError("host", "this host's name cannot be read: %s: %s" % (path, error.strerror)) from None


def this_machine() -> str:
    """A name for this host that survives reboots. The host name is part of it: cloned images share /etc/machine-id."""
    text = ""
    for path in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
        text = text or _read_id(path)
    return "%s/%s" % (text, os.uname().nodename)


def boot_id() -> str:
    """A text that changes with each boot; empty if the kernel does not provide it."""
    return _read_id("/proc/sys/kernel/random/boot_id")


def own_identity() -> Identity:
    process = process_of(os.getpid())
    return Identity(this_machine(), boot_id(), process.pid, process.start_time, os.uname().nodename)


def is_alive(identity: Identity) -> bool:
    """Whether this very process runs on this host. False for a process of another machine or boot."""
    return (
        identity.machine_id == this_machine()
        and identity.boot_id == boot_id()
        and is_running(Process(identity.pid, identity.start_time))
    )
