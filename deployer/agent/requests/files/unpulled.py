"""Lists the files of a job that a pull does not copy: they stay on the host until the user requests them.

Stdlib only, Python 3.8: this package runs on the host.
"""

import os
import re
import stat
from typing import Dict, Iterator, List, Optional, Sequence, Set, Tuple

from ...host.errors import AgentError
from ...host.layout import Job, Root
from ...job.plan import Plan
from ...job.record import known_record
from ...job.status import LOST, Status, read_stored_status, slot_of
from ...python.made import MADE
from ...store.content import Store
from ...store.tree import Entry, file_hash, folders_of
from .view import UnpulledFiles

OURS = re.compile(r"(code|lib|control|ranks|tokens)\Z|\.|config\.attempt_\d+\.yaml\Z|.*\.tmp\Z")
"""Names in a job's folder that no program writes, or that are of use only on the host."""
NOT_RESULTS = ("__pycache__", ".git")
MOST_LOOKS = 200_000
LARGEST = 3
MOST_NAMES = 6
MOST_HASHED_BYTES = 64 << 20


def list_unpulled(root: Root, job: Job, plan: Optional[Plan], asked: Sequence[str]) -> UnpulledFiles:
    """The files that the job wrote into its folder and its code, without those below the `asked` paths."""
    looks = _Looks(job.path, asked)
    found: List[Tuple[int, str, str]] = []  # size, path, the name that brings it
    for name in sorted(os.listdir(job.path)):
        if not OURS.match(name):
            found += [(info.st_size, path, name) for path, info in looks.below(name)]
    shipped = _Shipped(root, job, plan)
    found += [
        (info.st_size, path, shipped.name_of(path)) for path, info in looks.below("code") if shipped.lacks(path, info)
    ]
    found.sort(reverse=True)
    return UnpulledFiles(
        len(found),
        sum(size for size, _, _ in found),
        tuple(path for _, path, _ in found[:LARGEST]),
        _names(list(dict.fromkeys(name for _, _, name in found))),
        looks.left <= 0,
    )


def _has_setup(plan: Optional[Plan]) -> bool:
    return plan is not None and plan.setup is not None


def _names(names: List[str]) -> Tuple[str, ...]:
    """The names for a pull: the project's files by their own names, or all of its code if there are too many."""
    own = [name for name in names if name.startswith("code/")]
    others = [name for name in names if name not in own]
    return (*others, *(["code"] if len(own) > MOST_NAMES else [name[len("code/") :] for name in own]))


class _Looks:
    """Walks through a job's folder, up to a maximum number of files."""

    def __init__(self, base: str, asked: Sequence[str]) -> None:
        self.left = MOST_LOOKS
        self._base = base
        self._asked = set(asked)

    def below(self, part: str) -> Iterator[Tuple[str, os.stat_result]]:
        """Every regular file at this path and below it, relative to the job's folder."""
        waiting = [part]
        while waiting and self.left > 0:
            path = waiting.pop()
            self.left -= 1
            if path in self._asked or os.path.basename(path) in NOT_RESULTS:
                continue
            try:
                info = os.lstat(os.path.join(self._base, path))
                if stat.S_ISREG(info.st_mode):
                    yield path, info
                elif stat.S_ISDIR(info.st_mode):
                    waiting += ["%s/%s" % (path, name) for name in os.listdir(os.path.join(self._base, path))]
            except OSError:  # gone since its folder was read, or not ours to read
                continue


class _Shipped:
    """The job's code as it was sent."""

    def __init__(self, root: Root, job: Job, plan: Optional[Plan]) -> None:
        self._base = job.path
        self._entries: Optional[Dict[str, Entry]] = None
        self._folders: Set[str] = set()
        record = known_record(job)
        # the folder of its setup's files, which do not count as the job's
        status = read_stored_status(job).status or Status(LOST)
        self._made = os.path.join(slot_of(status, "setup"), MADE) if _has_setup(plan) else ""
        self._since_ns = (record.created_at or 0.0) * 1e9 if record is not None else 0.0
        try:
            entries = Store(root).load_tree(plan.tree) if plan is not None else None
        except (AgentError, OSError, ValueError):
            entries = None  # it may have been collected: then the times tell
        if entries is not None:
            self._entries = {entry.path: entry for entry in entries}
            self._folders = set(folders_of(entries))

    def lacks(self, path: str, info: os.stat_result) -> bool:
        """Whether the job has made this file, or changed it."""
        if self._made and self._is_of_setup(path, info):
            return False
        is_later = info.st_ctime_ns > self._since_ns
        if self._entries is None:
            return is_later
        entry = self._entries.get(path)
        if entry is None or info.st_size != entry.size:
            return True
        if not is_later:
            return False
        if info.st_size > MOST_HASHED_BYTES:
            return True
        try:
            return file_hash(os.path.join(self._base, path)) != entry.hash
        except OSError:
            return True

    def _is_of_setup(self, path: str, info: os.stat_result) -> bool:
        try:
            kept = os.lstat(os.path.join(self._made, path[len("code/") :]))
        except OSError:
            return False
        return (kept.st_size, kept.st_mtime_ns) == (info.st_size, info.st_mtime_ns)

    def name_of(self, path: str) -> str:
        """The topmost folder that was not sent, or else the file itself."""
        parts = path.split("/")
        if self._entries is None:
            return "/".join(parts[:2])
        tops = ("/".join(parts[:depth]) for depth in range(2, len(parts)))
        return next((top for top in tops if top not in self._folders), path)
