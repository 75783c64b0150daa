"""Who may touch the store: launches together, a collection of garbage alone.

A launch finds a blob or a tree here and copies it a moment later; what is collected must not go in between. The kernel
frees the locks with their processes. Stdlib only, Python 3.8: this package runs on the host.
"""

import fcntl
import os
from contextlib import contextmanager
from typing import Iterator

from ..host.errors import AgentError
from ..host.layout import Root
from ..host.locks import take_lock

WAIT_S = 10.0
"""How long a collection waits for launches."""
LAUNCH_WAIT_S = 60.0
"""How long a launch waits for a collection, which holds the store for moments; longer than this, it hangs."""


@contextmanager
def store_in_use(root: Root, *, wait_s: float = LAUNCH_WAIT_S) -> Iterator[None]:
    """Nothing is collected meanwhile; waits for a collection that is under way. A file system without locks is no
    reason not to launch: nothing can be collected there. AgentError when a collection does not end."""
    fd = _open(root)
    try:
        try:
            locked = take_lock(fd, fcntl.LOCK_SH, wait_s=wait_s)
        except OSError:
            locked = True
        if not locked:
            hint = "end the process that holds %s/store/gc.lock" % root.path
            raise AgentError("host", "gc has been at work in %s for %g s" % (root.path, wait_s), hint)
        yield
    finally:
        os.close(fd)


@contextmanager
def store_alone(root: Root, *, wait_s: float = WAIT_S) -> Iterator[None]:
    """No launch finds or copies anything meanwhile. AgentError when launches are at it for longer than `wait_s`."""
    fd = _open(root)
    try:
        try:
            locked = take_lock(fd, wait_s=wait_s)
        except OSError as error:
            raise AgentError("host", "%s cannot be locked: %s" % (root.path, error.strerror), "nothing was removed")
        if not locked:
            raise AgentError("host", "a launch is under way in %s" % root.path, "nothing was removed; try again")
        yield
    finally:
        os.close(fd)


def _open(root: Root) -> int:
    folder = os.path.join(root.path, "store")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    return os.open(os.path.join(folder, "gc.lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
