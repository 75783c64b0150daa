"""Who may touch the store: launches together, a collection of garbage alone.

A launch finds a blob or a tree here and copies it a moment later; what is collected must not go in between. The kernel
frees the locks with their processes. Stdlib only, Python 3.8: this package runs on the host.
"""

import fcntl
import os
import time
from contextlib import contextmanager
from typing import Iterator, Optional

from .errors import AgentError
from .layout import Root

WAIT_S = 10.0
"""How long a collection waits for launches."""
LAUNCH_WAIT_S = 60.0
"""How long a launch waits for a collection, which holds the store for moments; longer than this, it hangs."""
_POLL_S = 0.05


@contextmanager
def store_in_use(root: Root, *, wait_s: float = LAUNCH_WAIT_S) -> Iterator[None]:
    """Nothing is collected meanwhile; waits for a collection that is under way. A file system without locks is no
    reason not to launch: nothing can be collected there. AgentError when a collection does not end."""
    fd = _open(root)
    try:
        try:
            locked = _lock(fd, fcntl.LOCK_SH, wait_s)
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
            locked = _lock(fd, fcntl.LOCK_EX, wait_s)
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


def _lock(fd: int, how: int, wait_s: float) -> bool:
    """False when it could not be had in time. OSError where there are no locks."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(fd, how | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
        time.sleep(_POLL_S)


def hold_agent(folder: str) -> Optional[int]:
    """Marks an agent's folder as in use for this process's life; the descriptor that does, None where it cannot."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(fd, fcntl.LOCK_SH)
    except OSError:
        return None
    return fd


def is_held(path: str) -> bool:
    """Whether a process holds a lock on a file or folder, or nobody can tell; what is missing is free."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False
