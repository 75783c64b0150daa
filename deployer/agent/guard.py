"""Whether another account of the host could change files that we run or write, and folders that no other account can
change.

The check covers the very path that is used: a folder that is owned by us (or root), in a folder that nobody else may
write to, cannot be renamed or replaced by another account. So its path means the same folder as long as it exists. In a
folder with the sticky bit, this holds for our entries.

Stdlib only, Python 3.8. It is sent before the loader, in the same text, so it imports nothing from this package.
"""

import errno
import os
import stat
from typing import Iterable, Set

TRUSTED = "~/.torchferry-trusted"
"""A file with one folder per line: every account that can write to these folders may run code as the user."""
OURS = ("agent", "jobs", "store", "data", "envs", "tmp", "cache")
"""The folders of a root whose files are executed or written."""
MOST_LINKS = 40


class Refused(OSError):
    """A path that another account could change. `hint`: what the user can do about it, if the path is the user's."""

    hint = ""


def correct_home(*, must_be_ours: bool) -> None:
    """Sets HOME from the account's entry if HOME is empty, relative or `/` (nobody's home). With `must_be_ours`, also
    if it is not a folder or belongs to another account."""
    if _is_home(os.environ.get("HOME", ""), must_be_ours):
        return
    try:
        import pwd

        entry = pwd.getpwuid(os.getuid()).pw_dir
    except (KeyError, ImportError):
        entry = ""
    if _is_home(entry, must_be_ours):
        os.environ["HOME"] = entry
    elif not os.environ.get("HOME", "").startswith("/"):
        os.environ.pop("HOME", None)


def _is_home(path: str, must_be_ours: bool) -> bool:
    if not path.startswith("/") or not path.strip("/"):
        return False
    return not must_be_ours or (os.path.isdir(path) and os.stat(path).st_uid in (0, os.getuid()))


def find_root(text: str) -> str:
    """The absolute path of a root as the user gave it. Raises OSError if it is below a home that does not exist."""
    path = os.path.expanduser(text)
    if path.startswith("~"):
        mine = text.split("/")[0] == "~"
        raise OSError(0, "this account has no home folder" if mine else "there is no such user", text)
    return os.path.abspath(path)


def secure_root(root: str) -> bool:
    """Creates the root with mode 0700 unless it exists. From then on no other account can replace it or one of OURS.
    Raises Refused if one could; returns True if one could and the user trusts it (see TRUSTED)."""
    try:
        _secure_all(root, set())
        return False
    except Refused:
        trusted = _read_trusted()
        if not trusted:
            raise
        _secure_all(root, trusted)
        return True


def _secure_all(root: str, trusted: Set[str]) -> None:
    is_open = _is_shared(secure(root, trusted))
    for name in OURS:
        path = os.path.join(root, name)
        if is_open or os.path.lexists(path):  # where it is closed only we can make it
            real = secure(path, trusted)
            # a sticky bit is not enough here: others could create names that we look for
            if _is_shared(real) and not _is_below(real, trusted):
                raise _open_to_others(real)


def secure(path: str, trusted: Iterable[str] = ()) -> str:
    """Creates a folder with mode 0700 unless it exists, and returns its path without links. Raises Refused if another
    account could rename or replace it or a folder above it."""
    owners = (0, os.getuid())
    real, rest, links = "/", path.split("/")[::-1], 0
    while True:
        found = os.lstat(real)
        free = _is_below(real, trusted)
        if not free and found.st_uid not in owners:
            raise Refused(0, "it belongs to another user, " + _name_of(found.st_uid), real)
        if not free and _is_shared(real) and not found.st_mode & stat.S_ISVTX:
            raise _open_to_others(real)
        while rest and rest[-1] in ("", "."):
            rest.pop()
        if not rest:
            return real
        name = rest.pop()
        if name == "..":
            real = os.path.dirname(real)
            continue
        step = os.path.join(real, name)
        if not os.path.lexists(step):
            try:
                os.mkdir(step, 0o700)
            except FileExistsError:  # whose it is, the next look tells
                pass
        found = os.lstat(step)
        if stat.S_ISDIR(found.st_mode):
            real = step
            continue
        if not stat.S_ISLNK(found.st_mode):
            raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), step)
        if not free and found.st_uid not in owners:
            raise Refused(0, "the link belongs to another user, " + _name_of(found.st_uid), step)
        links += 1
        if links > MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), step)
        target = os.readlink(step)
        rest += target.split("/")[::-1]
        real = "/" if target.startswith("/") else real


def _is_below(path: str, folders: Iterable[str]) -> bool:
    return any((path + "/").startswith(folder.rstrip("/") + "/") for folder in folders)


def _is_shared(folder: str) -> bool:
    """Whether another account than root and this one can write into it."""
    found = os.lstat(folder)
    if found.st_mode & stat.S_IWOTH or not found.st_mode & stat.S_IWGRP:
        return bool(found.st_mode & stat.S_IWOTH)
    try:  # many systems give each user their own group
        import grp
        import pwd

        group, mine = grp.getgrgid(found.st_gid), {"root"}
        if group.gr_gid != 0:  # root's own, where each container's user may be in without a name
            me = pwd.getpwuid(os.getuid())
            mine.add(me.pw_name)
            if group.gr_gid != me.pw_gid or group.gr_name != me.pw_name or _first_members(group.gr_gid) - mine:
                return True
        if set(group.gr_mem) - mine:
            return True
        os.getxattr(folder, "system.posix_acl_access")  # then these bits are not the group's, but any user's
        return True
    except (KeyError, ImportError):
        return True
    except OSError:
        return False


def _first_members(gid: int) -> Set[str]:
    """The accounts in /etc/passwd with this primary group, which the group itself does not list."""
    try:
        with open("/etc/passwd", encoding="utf-8", errors="replace") as f:
            rows = [line.split(":") for line in f]
    except OSError:
        return set()
    return {row[0] for row in rows if len(row) > 3 and row[3] == str(gid)}


def _open_to_others(path: str) -> Refused:
    mode = stat.S_IMODE(os.lstat(path).st_mode)
    refused = Refused(0, "other users can write into it (mode %o)" % mode, path)
    refused.hint = "if it is yours, chmod go-w or +t it; or "
    return refused


def _name_of(uid: int) -> str:
    try:
        import pwd

        return "%s (uid %d)" % (pwd.getpwuid(uid).pw_name, uid)
    except (KeyError, ImportError):
        return "uid %d" % uid


def _read_trusted() -> Set[str]:
    """The folders in the user's file. Raises OSError if another account could have written it."""
    path = os.path.expanduser(TRUSTED)
    if not os.path.lexists(path):
        return set()
    path = os.path.join(secure(os.path.dirname(path)), os.path.basename(path))
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), errors="surrogateescape") as f:
        if os.fstat(f.fileno()).st_uid not in (0, os.getuid()) or _is_shared(path):
            why = "other users can write to it, so no folder that it names counts: make it yours and chmod 600 it"
            raise OSError(0, why, path)
        lines = [os.path.expanduser(line.strip()) for line in f.read(1 << 16).split("\n")]
    return {os.path.realpath(line) for line in lines if line.startswith("/")}
