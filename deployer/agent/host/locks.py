"""Locks on files and folders, between processes; the kernel frees them with the last descriptor of their holder.

Stdlib only, Python 3.8: this package runs on the host.
"""

import fcntl
import os
import time
from contextlib import contextmanager
from typing import Iterator, Optional

from .layout import Job


def take_lock(fd: int, how: int = fcntl.LOCK_EX, *, wait_s: float = 0.0, poll_s: float = 0.05) -> bool:
    """False when others hold it for longer than `wait_s`. OSError where there are no locks."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(fd, how | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
        time.sleep(poll_s)


def hold(folder: str) -> Optional[int]:
    """Marks a folder as in use for this process's life; the descriptor that does, None where it cannot."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(fd, fcntl.LOCK_SH)
    except OSError:
        return None
    return fd


def is_held(path: str, against: int = fcntl.LOCK_EX) -> bool:
    """Whether another process's lock on a file or folder keeps off one of the kind `against`, or nobody can tell; what
    is missing is free."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        return not take_lock(fd, against)
    except OSError:
        return True
    finally:
        os.close(fd)


@contextmanager
def locked(job: Job) -> Iterator[None]:
    """Holds the job against a launch, a resume or a sweep at the same moment."""
    os.makedirs(job.control, mode=0o700, exist_ok=True)
    with open(job.lock, "a") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        yield
