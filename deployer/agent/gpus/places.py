"""The folders of GPU claims, and protection against other accounts there.

Every account may write to the lease folder, which the first user creates. Only its owner and root can remove another's
names in it, or replace the folder. So if another account owns it, a claim is first a file beside the folder, in /tmp.
/tmp belongs to root and is sticky: only the creator of a name can remove it. The folder gets a second name of the file,
for older agents. A reader reads both places; a process that claims locks both.

Stdlib only, Python 3.8, Linux.
"""

import errno
import fcntl
import os
import re
import stat
import time
from collections import Counter
from contextlib import contextmanager
from itertools import islice
from typing import Iterator, List, NamedTuple, Optional, Tuple

from ..host.errors import AgentError
from ..host.layout import LEASE_NAME
from ..host.locks import lock_holders, lock_key, take_lock
from ..host.processes import command_of, uid_of, user_name

FOLDER = "/tmp/.torchferry-leases"
FOLDER_ENV = "TORCHFERRY_LEASE_DIR"
MAX_ENTRIES = 1000000
"""Maximum number of names of any kind in one place; listing them takes a second. With more, no process can be sure to
have seen all claims."""
MAX_OF_ONE = 1000
"""Maximum number of claims of one other account, because each is opened. No account has this many jobs on one
machine."""
_TRIES, _TRY_S = 20, 0.005
_UNSEEN = "a process that this login cannot see"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class LeaseDir(NamedTuple):
    path: str
    fd: int
    prefix: str  # of the names of claims in it

    def name(self, job: str) -> str:
        return "%sjob-%s-%s.lock" % (self.prefix, job, os.urandom(8).hex())

    @property
    def claims(self) -> "re.Pattern[str]":
        return re.compile(re.escape(self.prefix) + LEASE_NAME)


class LeaseDirs:
    """The open places: the folder, and the folder above it if that is safe."""

    def __init__(self, folder: LeaseDir, beside: List[LeaseDir]) -> None:
        self.folder = folder
        self.all = [*beside, folder]
        self.owner = os.fstat(folder.fd).st_uid
        """The folder's owner."""
        self.foreign = self.owner not in (0, os.geteuid())
        same_disk = all(os.fstat(place.fd).st_dev == os.fstat(folder.fd).st_dev for place in beside)
        writable = all(os.access(place.path, os.W_OK | os.X_OK) for place in beside)
        self.guarded = bool(beside) and self.foreign and same_disk and writable
        """Whether a claim gets a name beside the folder, which no other account can remove."""

    def wanted(self) -> List[LeaseDir]:
        """The places where a claim has a name; it is created in the first one."""
        return self.all if self.guarded else [self.folder]

    def candidates(self, *, most: int = MAX_ENTRIES) -> List[Tuple[LeaseDir, str]]:
        """Every name that may be a claim. Raises AgentError, with the owner of the files, if there are too many to
        read: a real claim could be among the others."""
        found, of = [], Counter()  # type: List[Tuple[LeaseDir, str]], Counter[int]
        for place in self.all:
            try:
                names = _claim_names(place, most, of)
                if names is None:
                    raise _crowded("more than %d files in %s" % (most, place.path), _crowd(place, most))
            except OSError as e:
                raise self.refused(e)
            found += [(place, name) for name in names]
        many = Counter({uid: count for uid, count in of.items() if uid not in (0, os.geteuid()) and count > MAX_OF_ONE})
        if many:
            what = "more than %d files that look like leases, of one user" % MAX_OF_ONE
            raise _crowded(what, _crowd_text(many))
        return found

    def refused(self, error: OSError) -> AgentError:
        """The error for a place that cannot be read or written, with the user who causes it: its owner, or the one who
        fills it."""
        why = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            crowd = "; ".join("%s has %s" % (place.path, _crowd(place, MAX_ENTRIES)) for place in self.all)
            return unusable("%s: %s" % (why, crowd))
        return unusable("%s; it belongs to user %s" % (why, user_name(self.owner)))


@contextmanager
def opened() -> Iterator[LeaseDirs]:
    """Opens the places, and creates the folder if needed. Raises AgentError if the folder is not usable, with its
    owner."""
    path = folder_path()
    fds = []  # type: List[int]
    try:
        beside = []
        above = _open_above(path)
        if above >= 0:
            fds.append(above)
            prefix = ".%s-" % os.path.basename(path).lstrip(".")
            beside.append(LeaseDir(os.path.dirname(path), above, prefix))
        folder = _open_folder(path)
        fds.append(folder)
        yield LeaseDirs(LeaseDir(path, folder, ""), beside)
    finally:
        for fd in fds:
            os.close(fd)


@contextmanager
def locked(places: LeaseDirs, timeout_s: float) -> Iterator[None]:
    """Locks all places, so that no other process claims at the same time. Older agents lock the folder alone, but its
    owner, another account, could replace it."""
    deadline = time.monotonic() + timeout_s
    try:
        for place in places.all:
            _lock(place, deadline - time.monotonic(), timeout_s)
        yield
    finally:
        for place in places.all:
            fcntl.flock(place.fd, fcntl.LOCK_UN)  # a process forked meanwhile must not keep it


def folder_path() -> str:
    path = os.environ.get(FOLDER_ENV) or FOLDER
    if not os.path.isabs(path):
        raise AgentError("host", "%s=%s is no absolute path" % (FOLDER_ENV, path), "name the folder from / on")
    return os.path.normpath(path)  # a slash at its end would follow a link


def exposed() -> str:
    """Which account could hide claims made here; "" if none can."""
    with opened() as places:
        if not places.foreign or places.guarded:
            return ""
        return "%s belongs to user %s" % (places.folder.path, user_name(places.owner))


# --- opening ----------------------------------------------------------------------------------------------------------


def _open_above(path: str) -> int:
    """Opens the folder above if only its creator (and root) can remove a name in it; -1 otherwise."""
    try:
        fd = os.open(os.path.dirname(path), _FOLDER)
    except OSError:
        return -1
    found = os.fstat(fd)
    if found.st_uid in (0, os.geteuid()) and (found.st_mode & stat.S_ISVTX or not found.st_mode & 0o022):
        return fd
    os.close(fd)
    return -1


def _open_folder(path: str) -> int:
    why = "it is taken away as often as it is made"
    for _ in range(_TRIES):
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            pass
        except OSError as e:
            raise unusable(e.strerror or str(e))
        try:
            folder = os.open(path, _FOLDER | os.O_NOFOLLOW)
            if _is_everybodys(folder, path):
                return folder
            why = "%s, whose it is, lets not everybody in" % user_name(os.fstat(folder).st_uid)
            os.close(folder)
        except OSError as e:
            why = _what_is_there(path, e)
        time.sleep(_TRY_S)  # perhaps its owner has made it a moment ago, and has yet to let others in
    raise unusable(why)


def _is_everybodys(folder: int, path: str) -> bool:
    """Whether every account may write to the folder. Sets the mode if the folder is ours. Root first takes ownership of
    another account's folder, so that this account cannot remove files in it or replace it."""
    me, found = os.geteuid(), os.fstat(folder)
    if me == 0 and found.st_uid != 0:
        try:
            os.fchown(folder, 0, 0)
        except OSError:
            pass  # another machine's or container's root is none here
        found = os.fstat(folder)
        if not os.path.samestat(found, os.lstat(path)):
            return False  # put away a moment before
    if stat.S_IMODE(found.st_mode) != 0o1777 and found.st_uid == me:
        os.fchmod(folder, 0o1777)  # made a moment ago, or spoilt
        return True
    return stat.S_IMODE(found.st_mode) == 0o1777


def _what_is_there(path: str, error: OSError) -> str:
    try:
        found = os.lstat(path)
    except OSError:
        return error.strerror or str(error)
    whose = user_name(found.st_uid)
    if stat.S_ISLNK(found.st_mode):
        return "it is a link of user %s" % whose
    if not stat.S_ISDIR(found.st_mode):
        return "it is a file of user %s" % whose
    return "%s, whose it is, lets not everybody in" % whose


def unusable(why: str, hint: str = "") -> AgentError:
    what = "the folder of GPU leases, %s, cannot be used: %s" % (folder_path(), why)
    hint = hint or "remove it (as its owner or root)"
    return AgentError("host", what, hint + ", or run beside other jobs with --allow-busy")


# --- other accounts' files and locks ----------------------------------------------------------------------------------


def _claim_names(place: LeaseDir, most: int, of: "Counter[int]") -> Optional[List[str]]:
    """The names in a place that may be claims; None if it has more than `most` names of any kind."""
    names = []
    is_claim = place.claims.match
    with os.scandir(place.fd) as entries:
        for number, entry in enumerate(entries, 1):
            if number > most:
                return None
            if is_claim(entry.name) and _is_file(entry, of):
                names.append(entry.name)
    return names


def _is_file(entry: "os.DirEntry[str]", of: "Counter[int]") -> bool:
    """Whether the entry is a regular file; counts it for its owner."""
    try:
        found = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return False
    of[found.st_uid] += stat.S_ISREG(found.st_mode)
    return stat.S_ISREG(found.st_mode)


def _crowd(place: LeaseDir, most: int) -> str:
    """The owners of the files in a place, the largest number first."""
    of = Counter()  # type: Counter[int]
    with os.scandir(place.fd) as entries:
        for entry in islice(entries, most + 1):
            try:
                of[entry.stat(follow_symlinks=False).st_uid] += 1
            except OSError:
                pass
    return _crowd_text(of)


def _crowd_text(of: "Counter[int]") -> str:
    return ", ".join("%d files of user %s" % (count, user_name(uid)) for uid, count in of.most_common(3))


def _crowded(what: str, crowd: str) -> AgentError:
    return unusable("%s: %s" % (what, crowd), "remove that user's files there (as that user or root)")


def _lock(place: LeaseDir, wait_s: float, timeout_s: float) -> None:
    try:
        taken = take_lock(place.fd, wait_s=wait_s, poll_s=0.01)
    except OSError as e:
        raise unusable(e.strerror or str(e))
    if not taken:
        who = lock_holders().get(lock_key(os.fstat(place.fd)))
        text = _process(who[0]) if who else _UNSEEN
        why = "%s has had %s locked for more than %g s" % (text, place.path, timeout_s)
        raise unusable(why, "end that process (as its user or root)")


def _process(pid: int) -> str:
    uid = uid_of(pid)
    return _UNSEEN if uid is None else "pid %d of %s, %s," % (pid, user_name(uid), command_of(pid))
