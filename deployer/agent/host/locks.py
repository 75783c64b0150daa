"""Locks between processes: on files, folders, a job and the store. The kernel frees a lock when its last descriptor is
closed.

Stdlib only, Python 3.8: this package runs on the host.
"""

import fcntl
import os
import time
from contextlib import contextmanager, suppress
from typing import Dict, Iterator, List, Optional

from .errors import AgentError
from .layout import Job, Root

COLLECT_WAIT_S = 10.0
"""Seconds for which gc waits for launches."""
LAUNCH_WAIT_S = 60.0
"""Seconds for which a launch waits for gc, which holds the store only briefly; after this time gc hangs."""


def take_lock(fd: int, how: int = fcntl.LOCK_EX, *, wait_s: float = 0.0, poll_s: float = 0.05) -> bool:
    """Takes the lock. Returns False if another process holds it for longer than `wait_s`. Raises OSError if there are
    no locks here."""
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
    """Marks a folder as in use while this process lives. Returns the descriptor that does it, or None if that is not
    possible."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(fd, fcntl.LOCK_SH)
    except OSError:
        return None
    return fd


def is_held(path: str, against: int = fcntl.LOCK_EX) -> bool:
    """Whether another process holds a lock that conflicts with one of kind `against`. True also if that cannot be
    determined; False if the path does not exist."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
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
def locked(job: Job, *, anew: bool = False) -> Iterator[None]:
    """Holds the job's lock, so that no other launch, resume or sweep runs at the same time. `anew` (a launch): create
    the job's folder. Otherwise raises AgentError if the folder is gone, for example after gc."""
    fd = _take_lock_of(job, anew)
    try:
        yield
    finally:
        os.close(fd)


def _take_lock_of(job: Job, anew: bool) -> int:
    while True:
        fd = _open_lock(job, anew)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            if _leads_to(job.lock, fd):
                return fd
        except OSError:
            os.close(fd)
            raise
        os.close(fd)  # whoever had it has removed the job, and others lock what is there by now


def _open_lock(job: Job, anew: bool) -> int:
    try:
        if anew:
            os.makedirs(job.control, mode=0o700, exist_ok=True)
        elif not os.path.isdir(job.control):
            with suppress(FileExistsError):
                os.mkdir(job.control, 0o700)
        return os.open(job.lock, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if not anew and isinstance(error, FileNotFoundError):
            raise AgentError("unknown_job", "no job %s on this host" % job.id, "list them: deploy.py ps")
        with suppress(OSError):  # no half job stays on a full disk; one that has files is somebody's
            os.rmdir(job.control)
            os.rmdir(job.path)
        raise


def _leads_to(path: str, fd: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


@contextmanager
def store_in_use(root: Root, *, wait_s: float = LAUNCH_WAIT_S) -> Iterator[None]:
    """Keeps gc from running; waits for a gc that is running. Without locks on the file system, the launch goes on,
    because gc cannot run there. Raises AgentError if gc does not end."""
    fd = _open_store_lock(root)
    try:
        try:
            taken = take_lock(fd, fcntl.LOCK_SH, wait_s=wait_s)
        except OSError:
            taken = True
        if not taken:
            hint = "end the process that holds %s/store/gc.lock" % root.path
            raise AgentError("host", "gc has been at work in %s for %g s" % (root.path, wait_s), hint)
        yield
    finally:
        os.close(fd)


@contextmanager
def store_alone(root: Root, *, wait_s: float = COLLECT_WAIT_S) -> Iterator[None]:
    """Keeps launches from reading or copying stored files. Raises AgentError if launches take longer than `wait_s`."""
    fd = _open_store_lock(root)
    try:
        try:
            taken = take_lock(fd, wait_s=wait_s)
        except OSError as error:
            raise AgentError("host", "%s cannot be locked: %s" % (root.path, error.strerror), "nothing was removed")
        if not taken:
            raise AgentError("host", "a launch is under way in %s" % root.path, "nothing was removed; try again")
        yield
    finally:
        os.close(fd)


def _open_store_lock(root: Root) -> int:
    folder = os.path.join(root.path, "store")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    return os.open(os.path.join(folder, "gc.lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


# --- who holds a lock -------------------------------------------------------------------------------------------------


def lock_key(found: os.stat_result) -> str:
    """The file's name in /proc/locks."""
    return "%02x:%02x:%d" % (os.major(found.st_dev), os.minor(found.st_dev), found.st_ino)


def lock_holders() -> Dict[str, List[int]]:
    """The PIDs that took each held flock, according to /proc/locks. Such a process may have ended and left its lock to
    its children."""
    holders = {}  # type: Dict[str, List[int]]
    try:
        with open("/proc/locks") as f:
            for words in map(str.split, f):
                if len(words) > 5 and words[1] == "FLOCK":
                    holders.setdefault(words[5], []).append(int(words[4]))
    except (OSError, ValueError):
        pass
    return holders
