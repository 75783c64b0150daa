"""The processes of an attempt: those of each group, how they ended, and the ranks that have started.

Stdlib only, Python 3.8, Linux.
"""

import os
import time
from typing import List, Optional, Sequence, Set, Tuple

from ..host.layout import LAUNCHER_LOG, Job, rank_of
from ..host.marks import in_group, job_processes
from ..host.processes import Process, is_running
from ..job.ending import GroupEnd, RankRecord, ranks_of, read_ranks
from ..job.plan import of_main_role
from ..job.status import GroupStatus
from ..logs.times import sizes_of
from .children import Children

LAUNCHER_LOG_BYTES = 1 << 16
"""How much of its end is read, which has torchrun's summary."""


class Running:
    """An attempt's processes, including each group's main process, and their records."""

    def __init__(self, job: Job, number: int, groups: Sequence[GroupStatus], children: Optional[Children]) -> None:
        """`groups`: each with its main process. `children`: None if another supervisor has started them; its death may
        have ended a launcher whose ranks run on."""
        self.groups = tuple(groups)
        self.mains = {group.main for group in groups if group.main is not None}
        self._job = job
        self._number = number
        self._children = children
        self._read: Tuple[Sequence[int], List[RankRecord]] = ((), [])

    def has_ended(self, *, all_roles: bool = False) -> bool:
        """Whether the main role's groups, and therefore the attempt, have ended. `all_roles`: whether all groups
        have."""
        names = [group.name for group in self.groups]
        names = names if all_roles else of_main_role(names)
        if not all(self._main_has_ended(group) for group in self.groups if group.name in names):
            return False
        if self._children is not None:
            return True
        known = {process for rank in ranks_of(self.ranks(), names) for process in (rank.program, rank.wrapper)}
        return not any(map(is_running, known)) or not known & set(self.leftovers())

    def has_failed(self) -> bool:
        """Whether a rank or a group's main process has failed."""
        return any(rank.code for rank in self.ranks()) or any(map(self._code, self.groups))

    def unready(self, *, by_processes: bool = False) -> Set[str]:
        """The groups that do not count as running yet according to their records; `by_processes`: nor according to
        their visible processes."""
        begun = {group.folder: self._begun(group, by_processes=by_processes) for group in self.groups}
        return {group.folder for group in self.groups if not group.is_ready(begun[group.folder])}

    def ranks(self) -> List[RankRecord]:
        """The records; read again only if a folder has changed (or very recently: its time is coarse)."""
        changed_ns = [_changed_ns(self._job.ranks(self._number, group.folder)) for group in self.groups]
        if tuple(changed_ns) != self._read[0] or time.time_ns() - max(changed_ns) < 2_000_000_000:
            self._read = (tuple(changed_ns), read_ranks(self._job, self._number))
        return self._read[1]

    def leftovers(self) -> List[Process]:
        """All running processes of the job, including those that another supervisor started."""
        return leftovers(self._job)

    def ends(self) -> List[GroupEnd]:
        """The facts about the groups' ends that are not in the records."""
        return [
            GroupEnd(
                max(1, group.nproc),
                group.name,
                self._code(group),
                _end_of_file(os.path.join(self._job.logs(self._number, group.folder), LAUNCHER_LOG)),
                self._children.ended_ns(group.main.pid) if self._children is not None and group.main is not None else 0,
                self._spoken(group),
            )
            for group in self.groups
        ]

    def _spoken(self, group: GroupStatus) -> str:
        """A log of the group that is not empty; first the launcher's."""
        sizes = sizes_of(self._job.logs(self._number, group.folder))
        names = [LAUNCHER_LOG, *(name for name in sizes if rank_of(name, ".log") is not None)]
        return next((name for name in names if sizes.get(name)), "")

    def _code(self, group: GroupStatus) -> Optional[int]:
        return None if self._children is None or group.main is None else self._children.code(group.main.pid)

    def _main_has_ended(self, group: GroupStatus) -> bool:
        if group.main is None:
            return True
        return not is_running(group.main) if self._children is None else self._code(group) is not None

    def _begun(self, group: GroupStatus, *, by_processes: bool) -> int:
        begun = len(ranks_of(self.ranks(), [group.name]))
        if not by_processes or group.is_ready(begun):
            return begun
        return max(begun, len(set(in_group(self.leftovers(), group.folder)) - self.mains))


def leftovers(job: Job) -> List[Process]:
    return job_processes(job, supervisor=os.getpid())


def _changed_ns(folder: str) -> int:
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:
        return 0


def _end_of_file(path: str) -> str:
    try:
        with open(path, "rb") as f:
            f.seek(max(0, f.seek(0, os.SEEK_END) - LAUNCHER_LOG_BYTES))
            return f.read().decode("utf-8", "replace")
    except OSError:
        return ""
