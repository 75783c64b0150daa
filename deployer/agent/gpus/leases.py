"""Claims on this host's GPUs, across users: a claim is a file, and holding it is a lock on its descriptor.

Every process that inherits the descriptor holds the claim, so the kernel frees it with the last of them, however it
ends. A file that nobody holds is stale: its owner's next look removes it. The folder is this machine's alone, never
below a home. One file says who and what (its reading position stands at the end, so a job that has it for its stdin
reads end of file); the housekeepers of /tmp leave a locked file alone, and would take a second one from beside it.

Stdlib only, Python 3.8, Linux.
"""

import fcntl
import json
import os
import re
import stat
import time
from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

from ..host.errors import AgentError
from ..host.locks import take_lock
from ..host.processes import command_of
from .nvidia import user_name

FOLDER = "/tmp/.torchferry-leases"
FOLDER_ENV = "TORCHFERRY_LEASE_DIR"
MUTEX_S = 10.0
"""Whoever looks and claims holds the folder for milliseconds; longer than this, somebody hangs."""
MAX_BYTES = 16 << 10
MAX_FILES = 10000
MAX_NUMBER = 1 << 52

LEASE, SHARED, TICKET = "lease", "shared", "ticket"
_DEVICE = re.compile(r"GPU-[0-9A-Za-z-]{1,64}(/MIG-[0-9A-Za-z/-]{1,96})?\Z")
_WRITTEN = ("kind", "job", "devices", "auto", "number")
_NAME = re.compile(r"job-[a-z0-9][a-z0-9._-]{0,79}-[0-9a-f]{16}\.lock\Z")
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Claim(NamedTuple):
    """What one job holds, or waits for."""

    kind: str  # lease; shared: beside others, it keeps nobody out; ticket: a place in the queue
    job: str
    devices: Tuple[str, ...]  # GPU-…, or GPU-…/MIG-… for a slice; a ticket's are those it waits for
    auto: int = 0  # a ticket's: any so many GPUs
    number: int = 0  # a ticket's place: the lower ones come first
    uid: int = -1  # the file's owner, whatever the text in it says
    since: float = 0.0  # Unix time
    file: str = ""

    @property
    def user(self) -> str:
        return user_name(self.uid)


class Held:
    """A claim that this process holds by the descriptor `fd`, as does whoever inherits it."""

    def __init__(self, claim: Claim, fd: int) -> None:
        self.claim = claim
        self.fd = fd
        self.visible = ""
        """Of a lease: CUDA_VISIBLE_DEVICES for the job."""

    def handed(self) -> Dict[str, Any]:
        """As data, for a process that inherits the descriptor under its number."""
        return {"fd": self.fd, "claim": self.claim._asdict(), "visible": self.visible}

    @property
    def is_lost(self) -> bool:
        """Whether somebody has removed the file (with all of /tmp, say): nobody sees the claim any more."""
        return self.fd >= 0 and os.fstat(self.fd).st_nlink == 0

    def release(self) -> None:
        """Lets go; the file goes too, unless another process still holds the claim."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            try:
                read_claims()  # which removes what nobody holds
            except (AgentError, OSError):
                pass  # then the next look does


def read_claims() -> List[Claim]:
    """All claims that somebody holds. Contents are other users' words: bounded, and what makes no sense is left out."""
    folder = _open_folder()
    try:
        return _read_all(folder)
    finally:
        os.close(folder)


@contextmanager
def claiming(timeout_s: float = MUTEX_S) -> Iterator["Claims"]:
    """The claims, with the right to add one: nobody else on this host looks and claims meanwhile."""
    folder = _open_folder()
    try:
        _lock(folder, timeout_s)
        yield Claims(folder)
    finally:
        fcntl.flock(folder, fcntl.LOCK_UN)  # a process forked meanwhile must not keep it
        os.close(folder)


class Claims:
    """The claims of a folder that is held; see `claiming`."""

    def __init__(self, folder: int) -> None:
        self._folder = folder

    def read(self) -> List[Claim]:
        return _read_all(self._folder)

    def hold(self, claim: Claim) -> Held:
        """Makes the claim and holds it. It appears locked, so nobody takes it for a stale one."""
        unique = os.urandom(8).hex()
        new, name = "new-" + unique, "job-%s-%s.lock" % (claim.job, unique)
        text = json.dumps({key: getattr(claim, key) for key in _WRITTEN})
        try:
            fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644, dir_fd=self._folder)
            with open(fd, "w", encoding="ascii") as f:
                os.fchmod(fd, 0o644)  # others read who it is, whatever the umask says
                f.write(text)
            held = os.open(new, _READ, dir_fd=self._folder)
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.lseek(held, 0, os.SEEK_END)
            os.set_blocking(held, True)
            os.rename(new, name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        except OSError as e:
            raise _unusable(e.strerror or str(e))
        return Held(claim._replace(uid=os.geteuid(), file=name, since=time.time()), held)


def take_over(handed: Dict[str, Any]) -> Held:
    """A claim that another process handed over with its descriptor; see `Held.handed`."""
    claim = {**handed["claim"], "devices": tuple(handed["claim"]["devices"])}
    held = Held(Claim(**claim), handed["fd"])
    held.visible = handed["visible"]
    if held.fd >= 0:
        os.set_inheritable(held.fd, False)
    return held


# --- the folder -------------------------------------------------------------------------------------------------------


def folder_path() -> str:
    return os.environ.get(FOLDER_ENV) or FOLDER


def _open_folder() -> int:
    """The folder, made if need be, by whoever comes first: its owner could remove another's claims (which loses only
    their sight of each other), and nothing worse. AgentError for anything else in its place."""
    path = folder_path()
    try:
        os.mkdir(path, 0o700)
        os.chmod(path, 0o1777)
    except FileExistsError:
        pass
    except OSError as e:
        raise _unusable(e.strerror or str(e))
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as e:
        raise _unusable("it is a link" if os.path.islink(path) else (e.strerror or str(e)))
    found = os.fstat(folder)
    if stat.S_IMODE(found.st_mode) != 0o1777:
        if found.st_uid != os.geteuid():
            os.close(folder)
            raise _unusable("%s, whose it is, lets not everybody in" % user_name(found.st_uid))
        os.fchmod(folder, 0o1777)  # made a moment ago, or spoilt
    return folder


def _unusable(why: str) -> AgentError:
    path = folder_path()
    hint = "remove it (as its owner or root), or run beside other jobs with --allow-busy"
    return AgentError("host", "the folder of GPU leases, %s, cannot be used: %s" % (path, why), hint)


def _lock(folder: int, timeout_s: float) -> None:
    try:
        taken = take_lock(folder, wait_s=timeout_s, poll_s=0.01)
    except OSError as e:
        raise _unusable(e.strerror or str(e))
    if not taken:
        raise _unusable("%s has had it locked for more than %g s" % (_who_locks(folder), timeout_s))


def _who_locks(folder: int) -> str:
    """The process that holds the folder, as far as /proc/locks tells."""
    found = os.fstat(folder)
    place = "%02x:%02x:%d" % (os.major(found.st_dev), os.minor(found.st_dev), found.st_ino)
    try:
        with open("/proc/locks") as f:
            lines = [line.split() for line in f]
        pid = next(int(words[4]) for words in lines if words[1] == "FLOCK" and words[5] == place)
        return "pid %d of %s, %s," % (pid, user_name(os.stat("/proc/%d" % pid).st_uid), command_of(pid))
    except (OSError, StopIteration, ValueError, IndexError):
        return "a process that is not seen here"


# --- the files --------------------------------------------------------------------------------------------------------


def _read_all(folder: int) -> List[Claim]:
    try:
        names = os.listdir(folder)[:MAX_FILES]
    except OSError as e:
        raise _unusable(e.strerror or str(e))
    claims = [_read(folder, name) for name in names if _NAME.match(name)]
    return [claim for claim in claims if claim is not None]


def _read(folder: int, name: str) -> Optional[Claim]:
    """None for a stale claim, which is removed when it is ours, and for what is none."""
    try:
        fd = os.open(name, _READ, dir_fd=folder)
    except OSError:
        return None
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            return None
        if take_lock(fd, fcntl.LOCK_SH):
            if found.st_uid == os.geteuid():
                os.unlink(name, dir_fd=folder)
            return None
        claim = parse_claim(os.read(fd, MAX_BYTES + 1))
        return claim and claim._replace(uid=found.st_uid, since=found.st_mtime, file=name)
    except OSError:
        return None
    finally:
        os.close(fd)


def parse_claim(data: bytes) -> Optional[Claim]:
    """A claim as its file has it; None for what is none. The job's name loses what could drive a terminal."""
    try:
        value = json.loads(data[:MAX_BYTES].decode("ascii"))
        kind, devices, auto, number = (value[key] for key in ("kind", "devices", "auto", "number"))
        job = re.sub(r"[^a-z0-9._-]", "?", str(value["job"]))[:80]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    well = kind in (LEASE, SHARED, TICKET) and isinstance(devices, list) and len(devices) <= 256
    numbers = all(type(n) is int and 0 <= n <= MAX_NUMBER for n in (auto, number))
    if not (well and numbers and all(isinstance(d, str) and _DEVICE.match(d) for d in devices)):
        return None
    return Claim(kind, job, tuple(devices), auto, number)
