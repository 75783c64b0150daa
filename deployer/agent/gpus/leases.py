"""Claims on this host's GPUs, across users: a claim is a file, and holding it is a lock on its descriptor.

Every process that inherits the descriptor holds the claim, so the kernel frees it with the last of these processes,
however it ends. A file that no process holds is stale: its owner's next read of the claims removes it. The folder (see
places.py) belongs to this machine and is never below a home. One file contains the claim and is also the job's stdin:
its read position is at the end, so a job reads end of file. Programs that clean /tmp skip a locked file, but would
delete a second, unlocked file beside it.

A reader of a claim may lock its file too, but only with a shared lock, which the holder's lock blocks. So other users
can make the claim of an ended job look held, but cannot make a held one look free.

Stdlib only, Python 3.8, Linux.
"""

import errno
import fcntl
import json
import os
import re
import stat
import time
from contextlib import contextmanager
from typing import Dict, Iterator, List, Optional, Sequence, Tuple

from ..host.errors import AgentError
from ..host.locks import lock_holders, lock_key, take_lock
from ..host.processes import uid_of, user_name
from ..host.typed import InvalidData, parse
from .places import LeaseDir, LeaseDirs, locked, opened, unusable
from .view import LEASE, Claim, InheritedClaim

MUTEX_S = 10.0
"""Seconds to wait for the folder's lock: a claim holds it for milliseconds, so after this time its holder hangs."""
MAX_BYTES = 16 << 10
MAX_NUMBER = 1 << 52

_DEVICE = re.compile(r"GPU-[0-9A-Za-z-]{1,64}(/MIG-[0-9A-Za-z/-]{1,96})?\Z")
_WRITTEN = ("kind", "job", "devices", "auto", "number")
_NO_CLAIM = (errno.ENOENT, errno.ELOOP, errno.ENXIO)
"""The errors of opening a removed name, a link and a socket."""
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class HeldClaim:
    """A claim that this process holds through the descriptor `fd`, as does every process that inherits it; -1 if the
    claim could not be made. `visible`: CUDA_VISIBLE_DEVICES for the job of a lease. `names`: the claim's paths."""

    def __init__(self, claim: Claim, visible: str, fd: int = -1, names: Sequence[str] = ()) -> None:
        self.claim = claim
        self.visible = visible
        self.fd = fd
        self.names = list(names)
        self._mtime_ns = os.fstat(fd).st_mtime_ns if fd >= 0 else 0

    def to_inherit(self) -> InheritedClaim:
        """The claim for a process that inherits the descriptor under its number; see take_over."""
        return InheritedClaim(self.claim, self.visible, self.fd if self.fd >= 0 else None, tuple(self.names))

    @property
    def is_lost(self) -> bool:
        """Whether a name is gone or leads to another file (the folder was removed, renamed or replaced), so that other
        processes may not see the claim. Also true for a claim that could not be made."""
        if self.fd < 0:
            return True
        found = os.fstat(self.fd)
        return not all(_leads_to(name, found) for name in self.names)

    @property
    def is_changed(self) -> bool:
        """Whether the file's text was changed, so that others may not recognise the claim. Size and time are not
        enough: a failing disk changes neither."""
        return self.fd >= 0 and os.pread(self.fd, MAX_BYTES, 0) != _text(self.claim).encode("ascii")

    def write_again(self) -> None:
        """Restores the text and the modification time of the claim's file."""
        text = _text(self.claim).encode("ascii")
        fd = os.open("/proc/self/fd/%d" % self.fd, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.pwrite(fd, text, 0)
            os.ftruncate(fd, len(text))
            os.utime(fd, ns=(self._mtime_ns, self._mtime_ns))
        finally:
            os.close(fd)

    def release(self, *, ended: bool = False) -> None:
        """Releases the claim, and removes its file unless another process still holds it. `ended`: no process of the
        job is left, so a lock that none of our processes holds is another user's and no claim."""
        if self.fd < 0:
            return
        found = os.fstat(self.fd)
        os.close(self.fd)
        self.fd = -1
        for name in self.names:
            _remove_stale(name, found, ended=ended)


def read_claims() -> List[Claim]:
    """All claims that are held. Other users write their contents: sizes are limited, and a lease that cannot be parsed
    names no device."""
    with opened() as places:
        return _read_all(places)


@contextmanager
def claiming(timeout_s: float = MUTEX_S) -> Iterator["Claims"]:
    """The claims, with the right to add one: no other process on this host claims at the same time."""
    with opened() as places, locked(places, timeout_s):
        yield Claims(places)


def show_again(held: HeldClaim) -> HeldClaim:
    """Restores missing hard links to the claim's file; makes a new claim if none is left. Needs no lock, because the
    claim is held all the time."""
    with opened() as places:
        if held.fd < 0 or os.fstat(held.fd).st_nlink == 0:
            again = Claims(places).hold(held.claim, held.visible)
            if held.fd >= 0:
                os.close(held.fd)
            return again
        found = os.fstat(held.fd)
        leading = [name for name in held.names if _leads_to(name, found)]
        for place in places.wanted():
            if not any(os.path.dirname(name) == place.path for name in leading):
                leading.append(_link(held.fd, place, held.claim.job))
        held.names = leading
        return held


class Claims:
    """The claims in locked places; see `claiming`."""

    def __init__(self, places: LeaseDirs) -> None:
        self._places = places

    def read(self) -> List[Claim]:
        return _read_all(self._places)

    def hold(self, claim: Claim, visible: str = "") -> HeldClaim:
        """Makes the claim and holds it. The file is already locked when it gets its name, so it never looks stale."""
        try:
            first, *more = self._places.wanted()
            fd, name = _make(first, claim)
            names = [name]
            try:
                names += [_link(fd, place, claim.job) for place in more]
            except OSError as e:
                if e.errno != errno.EXDEV:
                    raise
                os.unlink(name)  # the folder is another mount, and other containers see that alone
                os.close(fd)
                fd, name = _make(self._places.folder, claim)
                names = [name]
        except OSError as e:
            raise self._places.refused(e)
        made = claim._replace(uid=os.geteuid(), file=lock_key(os.fstat(fd)), since=time.time(), locker="")
        return HeldClaim(made, visible, fd, names)


def take_over(inherited: InheritedClaim) -> HeldClaim:
    """The claim that another process passed on with its descriptor; see `HeldClaim.to_inherit`."""
    if inherited.fd is None:
        return HeldClaim(inherited.claim, inherited.visible)
    os.set_inheritable(inherited.fd, False)
    return HeldClaim(inherited.claim, inherited.visible, inherited.fd, inherited.names)


# --- the files --------------------------------------------------------------------------------------------------------


def _text(claim: Claim) -> str:
    return json.dumps({key: getattr(claim, key) for key in _WRITTEN})


def _make(place: LeaseDir, claim: Claim) -> Tuple[int, str]:
    """Creates a claim's file in a place, locked before another process can open it: (descriptor for reading, path)."""
    text = _text(claim)
    new, name = "%snew-%s" % (place.prefix, os.urandom(8).hex()), place.name(claim.job)
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=place.fd)
    held = -1
    try:
        with open(fd, "w", encoding="ascii") as f:
            held = os.open(new, _READ, dir_fd=place.fd)
            if not os.path.sameopenfile(fd, held):
                raise OSError(errno.ESTALE, "somebody has put another file in the place of a new one")
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            f.write(text)
            f.flush()
            os.fchmod(fd, 0o644)  # others read who it is, whatever the umask says
        os.lseek(held, 0, os.SEEK_END)
        os.set_blocking(held, True)
        os.rename(new, name, src_dir_fd=place.fd, dst_dir_fd=place.fd)
    except OSError:
        _unlink_quietly(new, place)  # on a full disk it would be in the way
        if held >= 0:
            os.close(held)
        raise
    return held, os.path.join(place.path, name)


def _link(fd: int, place: LeaseDir, job: str) -> str:
    """Makes a hard link to the open file in a place, if that is writable. If it is not, the returned path does not
    exist, and `keep` tries again."""
    name = place.name(job)
    try:
        os.link("/proc/self/fd/%d" % fd, name, dst_dir_fd=place.fd, follow_symlinks=True)
    except OSError as e:
        if e.errno == errno.EXDEV:
            raise
    return os.path.join(place.path, name)


def _unlink_quietly(name: str, place: LeaseDir) -> None:
    try:
        os.unlink(name, dir_fd=place.fd)
    except OSError:
        pass


def _leads_to(path: str, found: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.lstat(path), found)
    except PermissionError:
        return True  # nobody else sees the folder either, and is refused
    except OSError:
        return False


def _remove_stale(path: str, found: os.stat_result, *, ended: bool) -> None:
    try:
        fd = os.open(path, _READ)
    except OSError:
        return
    try:
        is_it = os.path.samestat(os.fstat(fd), found)
        if is_it and (take_lock(fd, fcntl.LOCK_SH) or (ended and not _is_ours_open(found))):
            os.unlink(path)
    except OSError:
        pass  # then the next look does
    finally:
        os.close(fd)


def _is_ours_open(found: os.stat_result) -> bool:
    """Whether another process of ours has the file open, or could have it but hides its files from us."""
    for pid in os.listdir("/proc"):
        if not pid.isdigit() or int(pid) == os.getpid() or uid_of(int(pid)) != os.getuid():
            continue
        try:
            fds = os.listdir("/proc/%s/fd" % pid)
        except PermissionError:
            return True
        except OSError:
            continue  # it has ended
        for fd in fds:
            try:
                if os.path.samestat(os.stat("/proc/%s/fd/%s" % (pid, fd)), found):
                    return True
            except OSError:
                continue  # closed meanwhile
    return False


def _read_all(places: LeaseDirs) -> List[Claim]:
    found: Dict[str, Claim] = {}
    for place, name in places.candidates():
        claim = _read(place, name)
        if claim is not None:
            found[claim.file] = claim
    return _with_lockers(list(found.values()))


def _read(place: LeaseDir, name: str) -> Optional[Claim]:
    """Reads a claim. None for a stale one, which is removed if it is ours, and for any other file. Raises AgentError if
    that cannot be determined: it could be a valid claim."""
    try:
        fd = os.open(name, _READ, dir_fd=place.fd)
    except OSError as e:
        if e.errno in _NO_CLAIM:
            return None
        raise _unreadable(place, name, e)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            return None
        if take_lock(fd, fcntl.LOCK_SH):
            if found.st_uid == os.geteuid():
                _unlink_quietly(name, place)
            return None
        claim = parse_claim(os.read(fd, MAX_BYTES + 1))
        if claim is None and found.st_uid in (0, os.geteuid()):  # another account's nonsense is just that
            claim = _of_all(place, name)
        return claim and claim._replace(uid=found.st_uid, since=found.st_mtime, file=lock_key(found))
    except OSError as e:
        raise _unreadable(place, name, e)
    finally:
        os.close(fd)


def _of_all(place: LeaseDir, name: str) -> Claim:
    """The claim of a held file that cannot be parsed (a failing disk, or another version): it may be for any GPU, so it
    counts for all."""
    found = place.claims.match(name)
    return Claim(LEASE, found.group(1) if found else "", ())


def _unreadable(place: LeaseDir, name: str, error: OSError) -> AgentError:
    try:
        uid = os.stat(name, dir_fd=place.fd, follow_symlinks=False).st_uid
    except OSError:
        uid = os.fstat(place.fd).st_uid  # who has shut the folder
    path = os.path.join(place.path, name)
    why = "%s of user %s cannot be read: %s" % (path, user_name(uid), error.strerror)
    return unusable(why, "remove that file (as its user or root)")


def _with_lockers(claims: List[Claim]) -> List[Claim]:
    """The claims with another user's lock on their file: after a job has ended, any user who may read the file can lock
    it and so keep it visible."""
    holders = lock_holders() if claims else {}
    return [claim._replace(locker=_stranger(holders.get(claim.file, []), claim.uid)) for claim in claims]


def _stranger(pids: Sequence[int], uid: int) -> str:
    for pid in pids:
        found = uid_of(pid)
        if found not in (uid, None):  # None: it has ended, and the holders have the lock from it
            return "pid %d of user %s" % (pid, user_name(found))
    return ""


def parse_claim(data: bytes) -> Optional[Claim]:
    """The claim in a file; None if there is none. Characters that could control a terminal are replaced in the job's
    name."""
    try:
        kind, job, devices, auto, number, *_ = parse(data, Claim, most=MAX_BYTES)
    except InvalidData:
        return None
    if len(devices) > 256 or max(auto, number) > MAX_NUMBER or not all(map(_DEVICE.match, devices)):
        return None
    return Claim(kind, re.sub(r"[^a-z0-9._-]", "?", job)[:80], devices, auto, number)
