"""A spare copy of the tree launched last, made while its job runs: the next launch creates only the files that differ.

Creating a thousand files is most of what an unchanged deployment costs on a host's disk; renaming two folders is not.
The spare is a copy like any other (hashed as it was copied, never linked to the store). It is taken by a rename, so
only one launch gets it, and counts only if nothing in it has been touched since it was made, nor the host started
anew: its files are not fsynced, and after a power cut one may be zeros that looks untouched.

Stdlib only, Python 3.8: this package runs on the host.
"""

import json
import os
import shutil
import subprocess
import time
from typing import Collection, Dict, List, NamedTuple, Optional, Sequence

from ..host.errors import AgentError
from ..host.layout import Root
from ..host.locks import store_in_use, take_lock
from ..host.machine import boot_id
from ..host.processes import own_process_argv
from ..host.typed import InvalidData, read_typed, to_json
from .content import Store
from .tree import MAX_BYTES as MAX_TREE
from .tree import Entry, check_entry

MAX_BYTES = 200 * 10**6
"""A larger tree gets no spare: it would cost more disk than it saves time."""
FREE_FACTOR = 4
"""A spare is made only where so many times its size is free."""

START_AFTER_S = 0.2
"""So long the job that was just launched has the disk to itself."""


class Spare(NamedTuple):
    """A folder whose `tree` holds files for one launch to take."""

    folder: str
    entries: List[Entry]  # those that nobody has touched
    untouched: bool = False  # nothing else is in it


class SpareRecord(NamedTuple):
    """record.json of a spare: what it was made of, and what its files were like then."""

    entries: List[Entry]
    marks: Dict[str, List[int]]
    boot: str = ""


def read_record(folder: str) -> SpareRecord:
    """Raises OSError or InvalidData."""
    record = read_typed(os.path.join(folder, "record.json"), SpareRecord, most=2 * MAX_TREE)
    for entry in record.entries:
        check_entry(entry)
    return record


def materialise(root: Root, root_hash: str, dest: str, *, arrived: Optional[Spare] = None) -> None:
    """The tree's files in `dest`, from the spare where it helps (or what has just arrived), else from the store.
    Errors as Store.materialise."""
    store = Store(root)
    entries = store.load_tree(root_hash)
    spare = arrived or _take(root)
    kept = _move_into(spare, entries, dest) if spare else []
    store.materialise(root_hash, dest, present=kept, entries=entries)


def discard(spare: Optional[Spare]) -> None:
    """Removes what a launch did not take; harmless when it was taken."""
    if spare is not None:
        shutil.rmtree(spare.folder, ignore_errors=True)


def make_later(root: Root, root_hash: str) -> None:
    """Starts a process that makes a spare of the tree and unpacks what has come, and comes back at once."""
    null = subprocess.DEVNULL
    argv = own_process_argv(__name__, root.path, root_hash, options=["-B"], nice=10)
    subprocess.Popen(argv, stdin=null, stdout=null, stderr=null, cwd="/", start_new_session=True, close_fds=True)


def main(root_path: str, root_hash: str) -> None:
    """Body of that process. One at a time: the others have nothing to add."""
    root = Root(root_path)
    with open(os.path.join(root.path, "store", "spare.lock"), "a") as lock:
        try:
            if not take_lock(lock.fileno()):
                return  # another process is at it
            time.sleep(START_AFTER_S)
            with store_in_use(root):
                make(root, root_hash)
                Store(root).unpack()
        except (OSError, AgentError):
            pass  # no room: a launch without a spare is only slower


def make(root: Root, root_hash: str) -> None:
    """Makes the spare of a tree in place of any older one."""
    store = Store(root)
    entries = store.load_tree(root_hash)
    size = sum(entry.size for entry in entries)
    disk = os.statvfs(root.path)
    if size > MAX_BYTES or size * FREE_FACTOR > disk.f_bavail * disk.f_frsize:
        return
    aside = os.path.join(root.tmp, "spare-%d" % os.getpid())
    try:
        store.materialise(root_hash, os.path.join(aside, "tree"), entries=entries)
        marks = _marks(os.path.join(aside, "tree"), entries)
        with open(os.path.join(aside, "record.json"), "w") as f:
            json.dump(to_json(SpareRecord(entries, marks, boot_id())), f)
        old = _rename_aside(root)
        os.rename(aside, _place(root))
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _place(root: Root) -> str:
    return os.path.join(root.path, "store", "spare")


def _rename_aside(root: Root) -> Optional[str]:
    """The spare under a name that is ours alone, which only one process can get; None when there is none."""
    aside = os.path.join(root.tmp, "spare-%d-%s" % (os.getpid(), os.urandom(4).hex()))
    try:
        os.rename(_place(root), aside)
    except OSError:
        return None
    return aside


def _take(root: Root) -> Optional[Spare]:
    aside = _rename_aside(root)
    if aside is None:
        return None
    try:
        record = read_record(aside)
        if record.boot != boot_id():
            raise InvalidData("it was made before the host was started anew")
        now = _marks(os.path.join(aside, "tree"), record.entries)
        return Spare(aside, [e for e in record.entries if now[e.path] == record.marks.get(e.path)])
    except (OSError, AgentError, InvalidData):
        shutil.rmtree(aside, ignore_errors=True)
        return None


def _marks(folder: str, entries: Sequence[Entry]) -> Dict[str, List[int]]:
    """What changes when anybody touches a file: size, modification and change time, inode."""
    return {entry.path: _mark(os.path.join(folder, entry.path)) for entry in entries}


def _mark(path: str) -> List[int]:
    info = os.lstat(path)
    return [info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino]


def _move_into(spare: Spare, wanted: Sequence[Entry], dest: str) -> List[Entry]:
    """Moves the spare's folders into `dest` without what is not wanted, and returns the entries that are there now."""
    tree = os.path.join(spare.folder, "tree")
    kept = set(spare.entries) & set(wanted)
    if not spare.untouched or len(kept) < len(spare.entries):
        _weed(tree, kept)
    for name in os.listdir(tree):
        os.rename(os.path.join(tree, name), os.path.join(dest, name))
    shutil.rmtree(spare.folder, ignore_errors=True)
    return list(kept)


def _weed(tree: str, kept: Collection[Entry]) -> None:
    """Removes all but the kept files, and the folders that are empty then."""
    keep = {os.path.join(tree, entry.path) for entry in kept}
    for folder, folders, files in os.walk(tree, topdown=False):
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        for path in (os.path.join(folder, name) for name in files + links):
            if path not in keep:
                os.unlink(path)
        if folder != tree and not os.listdir(folder):
            os.rmdir(folder)
