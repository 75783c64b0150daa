"""A spare copy of the last launched tree, made while its job runs: the next launch creates only the files that differ.

Creating a thousand files is most of the cost of an unchanged launch on a host's disk; renaming two folders is cheap.
The spare is a normal copy (hashed while it was copied, never linked to the store). A launch takes it by a rename, so
only one launch gets it. It is used only if none of its files was changed since and the host was not rebooted: its files
are not fsynced, and after a power cut a file may contain zeros although it looks unchanged.

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
"""A larger tree gets no spare: it would use more disk space than it saves time."""
FREE_FACTOR = 4
"""A spare is made only if this many times its size is free."""

START_AFTER_S = 0.2
"""Seconds for which the new job has the disk to itself."""


class Spare(NamedTuple):
    """A folder whose `tree` contains files for one launch."""

    folder: str
    entries: List[Entry]  # those that nobody has touched
    untouched: bool = False  # nothing else is in it


class SpareRecord(NamedTuple):
    """record.json of a spare: its tree, and its files' marks at that time."""

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
    """Writes the tree's files into `dest`: from `arrived`, else from the spare, and the others from the store. Raises
    like Store.materialise."""
    store = Store(root)
    entries = store.load_tree(root_hash)
    spare = arrived or _take(root)
    kept = _move_into(spare, entries, dest) if spare else []
    store.materialise(root_hash, dest, present=kept, entries=entries)


def discard(spare: Optional[Spare]) -> None:
    """Removes a spare that no launch took; safe if one did."""
    if spare is not None:
        shutil.rmtree(spare.folder, ignore_errors=True)


def make_later(root: Root, root_hash: str) -> None:
    """Starts a process that makes a spare of the tree and unpacks the packs; returns at once."""
    null = subprocess.DEVNULL
    argv = own_process_argv(__name__, root.path, root_hash, options=["-B"], nice=10)
    subprocess.Popen(argv, stdin=null, stdout=null, stderr=null, cwd="/", start_new_session=True, close_fds=True)


def main(root_path: str, root_hash: str) -> None:
    """The main function of that process. Only one runs at a time: another one would do the same work."""
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
    """Renames the spare to a name that only this process uses; None if there is none."""
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
    """Values that change if a file is changed: size, modification and change time, inode."""
    return {entry.path: _mark(os.path.join(folder, entry.path)) for entry in entries}


def _mark(path: str) -> List[int]:
    info = os.lstat(path)
    return [info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino]


def _move_into(spare: Spare, wanted: Sequence[Entry], dest: str) -> List[Entry]:
    """Moves the spare's folders into `dest`, without unwanted files. Returns the entries that are there now."""
    tree = os.path.join(spare.folder, "tree")
    kept = set(spare.entries) & set(wanted)
    if not spare.untouched or len(kept) < len(spare.entries):
        _weed(tree, kept)
    for name in os.listdir(tree):
        os.rename(os.path.join(tree, name), os.path.join(dest, name))
    shutil.rmtree(spare.folder, ignore_errors=True)
    return list(kept)


def _weed(tree: str, kept: Collection[Entry]) -> None:
    """Removes all files except the kept ones, and then the empty folders."""
    keep = {os.path.join(tree, entry.path) for entry in kept}
    for folder, folders, files in os.walk(tree, topdown=False):
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        for path in (os.path.join(folder, name) for name in files + links):
            if path not in keep:
                os.unlink(path)
        if folder != tree and not os.listdir(folder):
            os.rmdir(folder)
