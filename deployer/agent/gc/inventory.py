"""Reads a root's content for `choose`: jobs, and what jobs share or left behind.

The root may be a folder with other files (`--remote-root /workspace`, with its own `data/` and `jobs/`). Only names
that Torchferry alone uses are listed.

Stdlib only, Python 3.8, Linux.
"""

import calendar
import os
import re
import time
from typing import Callable, FrozenSet, Iterator, List, NamedTuple, Optional, Pattern, Set, Tuple

from ..host.files import open_regular, read_whole
from ..host.layout import AGENT_DIR, JOB_ID, JOB_ID_ENV, Job, Root
from ..host.locks import is_held
from ..host.machine import this_machine
from ..host.typed import InvalidData
from ..job.judge import judge
from ..job.status import FINAL, Status, slot_of
from ..store import packs
from ..store.spare import read_record
from ..store.tree import LINK, Entry, blobs_of, load_entries, root_hash
from .choose import AGENT, BLOB, CACHE, DATA, ENV, PACK, SPARE, TMP, TREE, GcObject, Inventory, JobItem

MAX_TEXT = 32 << 20
LAUNCH_AGE_S = 86400.0
"""A job folder without a status may be a launch on another machine that shares the home; after this time it is not."""
_TREE = re.compile(r"[0-9a-f]{40}\Z")  # of a tree, and of the data made from one
_ENV = re.compile(r"[0-9a-f]{20}\Z")
_AGENT = re.compile(r"[0-9a-f]{20}(\.\d+)?\Z")  # with a process id while it is being put there
_TMP = re.compile(r"(arrival|blob|data|doctor|gc|pack|spare|tree)-\d+(-[0-9a-f]+)?\Z")
_PREFIX = re.compile(r"[0-9a-f]{2}\Z")
_BLOB = re.compile(r"[0-9a-f]{38}\Z")
_PACK = re.compile(r"\d+-[0-9a-f]{16}\Z")
_COMPILED = re.compile(r"torch-[A-Za-z0-9._+-]+\Z")  # as trainer/start/caches.py names it
_BYTECODE = re.compile(r"bytecode(-[0-9a-f]{8})?\Z")
_GONE = re.compile(r"\.gc-\d+-[0-9a-f]+\Z")  # what gc has put aside where it was
_WORD = re.compile(rb"[a-z0-9][a-z0-9._-]*")
_BLOCK = 512  # of st_blocks, whatever the file system

Measure = Callable[[str], int]


def read_inventory(root: Root, *, measure: Optional[Measure] = None) -> Inventory:
    """Everything below the root. `measure`: returns a folder's size in bytes (default: its blocks on the disk, which
    needs a walk through all its files). A folder that cannot be read counts as empty; a job that cannot be read counts
    as not ended."""
    size = measure or disk_bytes
    now, live = time.time(), _Live.read()
    trees = dict(_read_trees(root))
    objects = [
        *(GcObject(TREE, name, _file_bytes(path), _age(path, now)) for name, path in _children(root.trees, _TREE)),
        *_blobs(root, now),
        *(GcObject(PACK, name, _file_bytes(path), _age(path, now)) for name, path in _children(root.packs, _PACK)),
        *(GcObject(DATA, name, size(path), _age(path, now)) for name, path in _children(root.data, _TREE)),
        *(GcObject(ENV, name, size(path), _age(path, now), live.names(name, path)) for name, path in _envs(root)),
        *(_agent(name, path, size(path), now, live) for name, path in _children(root.agents, _AGENT)),
        *(GcObject(TMP, os.path.relpath(path, root.path), size(path), _age(path, now)) for path in _leftovers(root)),
        *(GcObject(CACHE, name, size(path), _age(path, now)) for name, path in _caches(root)),
    ]
    spare = os.path.join(root.path, "store", "spare")
    if os.path.exists(os.path.join(spare, "record.json")):
        objects.append(GcObject(SPARE, "spare", size(spare), _age(spare, now)))
    return Inventory(
        jobs=tuple(_job(Job(path), size(path), now, live) for path in _job_folders(root)),
        objects=tuple(objects),
        blobs_of={name: frozenset(blobs_of(entries)) for name, entries in trees.items()},
        packed={name: _packed(path) for name, path in _children(root.packs, _PACK)},
        names_of={name: _link_words(entries) for name, entries in trees.items()},
        spare_tree=_spare_tree(spare),
    )


def disk_bytes(path: str) -> int:
    """Bytes of a file or a folder on the disk; a file with several hard links in it counts once."""
    seen: Set[Tuple[int, int]] = set()
    total = 0
    for name in _everything(path):
        try:
            info = os.lstat(name)
        except OSError:
            continue
        if (info.st_dev, info.st_ino) not in seen:
            total += info.st_blocks * _BLOCK
        if info.st_nlink > 1:
            seen.add((info.st_dev, info.st_ino))
    return total


def _file_bytes(path: str) -> int:
    try:
        return os.lstat(path).st_blocks * _BLOCK
    except OSError:
        return 0


def _everything(path: str) -> Iterator[str]:
    yield path
    if os.path.islink(path):
        return
    for folder, folders, files in os.walk(path):
        for name in folders + files:
            yield os.path.join(folder, name)


def _children(folder: str, pattern: "Pattern[str]") -> List[Tuple[str, str]]:
    """(name, path) of each entry of a folder whose name matches the pattern."""
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return []
    return [(name, os.path.join(folder, name)) for name in names if pattern.match(name)]


def _age(path: str, now: float) -> float:
    """Seconds since the last change; 0 if it is gone."""
    try:
        return now - os.lstat(path).st_mtime
    except OSError:
        return 0.0


# --- jobs -------------------------------------------------------------------------------------------------------------


def _job_folders(root: Root) -> List[str]:
    return [path for _, path in _children(root.jobs, JOB_ID) if _is_ours(Job(path))]


def _is_ours(job: Job) -> bool:
    """Whether a launch created the folder, or began to."""
    return os.path.exists(job.lock) or os.path.exists(job.record)


def _job(job: Job, size: int, now: float, live: "_Live") -> JobItem:
    status = _believed(job)
    texts = [_text(path) for path in (job.record, job.config, job.status)]
    return JobItem(
        id=job.id,
        size=size,
        ended_s=_ended_s(job, status, now) if status is not None and job.id not in live.jobs else None,
        foreign=status is not None and _is_foreign(status),
        names=frozenset().union(*(_words(text) for text in texts)) - {job.id},
        settled=status is not None and bool(slot_of(status, "python")),
        known=bool(texts[0]),
    )


def _believed(job: Job) -> Optional[Status]:
    """The job's state; None if it cannot be determined."""
    try:
        status = judge(job)
    except OSError:
        return None
    return None if status.damaged else status


def _ended_s(job: Job, status: Status, now: float) -> Optional[float]:
    if status.state not in FINAL:
        return None
    age_s = _age(job.path, now)
    if status.supervisor is None:  # nobody says on which machine it was started
        return age_s if age_s > LAUNCH_AGE_S else None
    try:
        return now - calendar.timegm(time.strptime(status.ended_at or "", "%Y-%m-%dT%H:%M:%SZ"))
    except ValueError:
        return age_s


def _is_foreign(status: Status) -> bool:
    return status.supervisor is not None and status.supervisor.machine_id != this_machine()


def _text(path: str) -> bytes:
    try:
        return read_whole(path, MAX_TEXT)
    except OSError:
        return b""


def _words(text: bytes) -> FrozenSet[str]:
    text = text.replace(b"\\n", b"\n")  # JSON's way to write the end of a line would stick to the next word
    return frozenset(word.decode("ascii") for word in _WORD.findall(text))


# --- the store --------------------------------------------------------------------------------------------------------


def _read_trees(root: Root) -> Iterator[Tuple[str, List[Entry]]]:
    """The trees that can be read; a damaged one is useless."""
    for name, path in _children(root.trees, _TREE):
        try:
            yield name, load_entries(_text(path))
        except InvalidData:
            continue


def _link_words(entries: List[Entry]) -> FrozenSet[str]:
    return frozenset().union(*(_words(os.fsencode(entry.hash)) for entry in entries if entry.mode == LINK))


def _blobs(root: Root, now: float) -> Iterator[GcObject]:
    for prefix, folder in _children(root.blobs, _PREFIX):
        try:
            found = [(entry.name, entry.stat(follow_symlinks=False)) for entry in os.scandir(folder)]
        except OSError:
            continue
        for name, info in ((name, info) for name, info in found if _BLOB.match(name)):
            yield GcObject(BLOB, prefix + name, info.st_blocks * _BLOCK, now - info.st_mtime)


def _packed(path: str) -> FrozenSet[str]:
    try:
        with open_regular(path) as f:
            return frozenset(digest for digest, _, _ in packs.read_index(f.fileno()))
    except OSError:
        return frozenset()  # damaged: its blobs are asked for again


def _spare_tree(spare: str) -> Optional[str]:
    try:
        return root_hash(read_record(spare).entries)
    except (OSError, InvalidData):
        return None


# --- environments and agents ------------------------------------------------------------------------------------------


def _envs(root: Root) -> List[Tuple[str, str]]:
    return [(name, path) for name, path in _children(root.envs, _ENV) if os.path.isdir(path)]


def _caches(root: Root) -> List[Tuple[str, str]]:
    """The folders of compiled code, under their path in the cache folder; each start of a trainer touches those that it
    uses. A link belongs to the user, and its target may serve others too, so it is left out."""
    compiled = _children(os.path.join(root.cache, "compile"), _COMPILED)
    found = [("compile/" + name, path) for name, path in compiled] + _children(root.cache, _BYTECODE)
    return [(name, path) for name, path in found if not os.path.islink(path)]


def _leftovers(root: Root) -> List[str]:
    """Files whose creation or removal was not finished."""
    where = (root.jobs, root.data, root.envs, root.agents, root.cache, os.path.join(root.cache, "compile"))
    beside = (found for folder in (*where, os.path.join(root.path, "store")) for found in _children(folder, _GONE))
    return [path for _, path in (*_children(root.tmp, _TMP), *beside)] + _bytecode_of_former_jobs(root)


def _bytecode_of_former_jobs(root: Root) -> List[str]:
    """The bytecode of removed jobs' code, which Python keeps below the code's path in the bytecode folder."""
    found: List[str] = []
    for _, folder in _children(root.cache, _BYTECODE):
        for path in sorted({root.jobs, os.path.realpath(root.jobs)}):
            jobs = _children(os.path.join(folder, path.lstrip("/")), JOB_ID)
            found += [kept for name, kept in jobs if not os.path.lexists(os.path.join(root.jobs, name))]
    return found


def _agent(name: str, path: str, size: int, now: float, live: "_Live") -> GcObject:
    own = os.path.realpath(path) == os.path.realpath(os.path.dirname(AGENT_DIR))
    in_use = own or name in live.words or is_held(path)
    return GcObject(AGENT, name, size, _age(path, now), in_use)


class _Live(NamedTuple):
    """What the command lines and environments of this user's processes name."""

    words: FrozenSet[str]  # of their command lines
    jobs: FrozenSet[str]  # ids of jobs of which a process runs

    @classmethod
    def read(cls) -> "_Live":
        words: Set[str] = set()
        jobs: Set[str] = set()
        marker = re.compile(rb"(?:^|\0)" + JOB_ID_ENV.encode("ascii") + rb"=([^\0]*)")
        for name in os.listdir("/proc"):
            if name.isdigit() and name != str(os.getpid()) and _is_own("/proc/" + name):
                words |= _words(_text("/proc/%s/cmdline" % name))
                jobs |= {os.fsdecode(found) for found in marker.findall(_text("/proc/%s/environ" % name))}
        return cls(frozenset(words), frozenset(jobs))

    def names(self, name: str, path: str) -> bool:
        """Whether a process was started from an environment, or one is being built there."""
        return name in self.words or is_held(path + ".lock")


def _is_own(path: str) -> bool:
    try:
        return os.stat(path).st_uid == os.getuid()
    except OSError:
        return False
