"""The stages of a stop: the stop file or TERM for the ranks, the grace period, TERM for torchrun, KILL for all.

torchrun gets no signal before the grace period is over: it kills its ranks 30 s after its own TERM, however long they
save. Stdlib only, Python 3.8, Linux.
"""

import signal
import time
from typing import Dict, Optional, Sequence, Set

from ..host.killing import Subreaper, kill_all
from ..host.processes import Process, read_stat, send
from ..job.ending import RankRecord, ranks_of
from ..job.status import GroupStatus
from ..job.stop import StopRequest
from .running import Running

LAUNCHER_S = 10.0
"""Seconds for torchrun to end after its TERM, and for all processes after KILL."""


class Stopping:
    """One running stop. `phase`: stopping (the grace period), ending (each torchrun got TERM), killing, given up."""

    def __init__(self, running: Running, *, subreaper: Subreaper, flagged: bool) -> None:
        """`flagged`: the ranks poll the stop file themselves; others get TERM."""
        self.phase = "stopping"
        self._running = running
        self._subreaper = subreaper
        self._flagged = flagged
        # not all ranks of these groups had started, so there is nothing to save and their torchrun gets TERM at once
        self._early = running.unready(by_processes=True)
        self.seen: Set[Process] = set()
        """The job's processes that were found at the beginning of each phase."""
        self._told: Set[Process] = set()
        self._ended: Set[str] = set()  # the groups whose torchrun was told
        self._believed: Dict[str, int] = {}  # of a group: records that name processes of the job
        self._request: Optional[StopRequest] = None
        self._deadline = 0.0
        self._phase_ends = 0.0

    def left_s(self) -> float:
        """Seconds of the grace period that are left."""
        return max(0.0, self._deadline - time.monotonic())

    def advance(self, request: StopRequest) -> str:
        """Does the next step and returns the phase. Call it again until the job has ended."""
        if request != self._request:
            if self._request is None:
                self.seen.update(self._running.leftovers())
            self._request = request
            self._deadline = min(request.deadline_mono, time.monotonic() + request.grace_s)
        if request.force and self.phase in ("stopping", "ending"):
            self._enter("killing")
        self._tell_ranks()
        if self.phase == "stopping":
            self._end_groups()
        if self.phase != "stopping" and not self._flagged and self.left_s() == 0:
            kill_ranks(self._running)  # they have had their TERM and the whole grace
        if self.phase in ("ending", "killing") and time.monotonic() >= max(self._phase_ends, self._deadline):
            self._enter("killing" if self.phase == "ending" else "given up")
        if self.phase == "killing":
            self.seen.update(kill_all(self._running.leftovers, subreaper=self._subreaper))
        return self.phase

    def _end_groups(self) -> None:
        """Sends TERM to the torchrun of each group that is early, or whose grace period is over."""
        is_over = self.left_s() == 0
        for group in self._running.groups:
            if (is_over or group.folder in self._early) and group.folder not in self._ended:
                self._ended.add(group.folder)
                if len(self._ended) == len(self._running.groups):
                    self._enter("ending")
                if group.main is not None:
                    _term(group.main)

    def _enter(self, phase: str) -> None:
        self.phase = phase
        self._phase_ends = time.monotonic() + LAUNCHER_S
        self.seen.update(self._running.leftovers())

    def _tell_ranks(self) -> None:
        """Sends TERM to ranks that do not poll the stop file; continues a halted rank, which could neither poll nor
        save."""
        if self._request is None or self._request.force:
            return
        ranks = self._running.ranks()
        new = [r for r in ranks if r.code is None and not {r.program, r.wrapper} & self._told]
        silent = [group for group in self._running.groups if not self._is_told(group)]
        if not new and not silent:
            return
        ours = set(self._running.leftovers())  # a record may be another job's, or older than a pid that was given away
        for rank in new:
            self._tell(rank.program, ours, group=True)
            if rank.wrapper in ours:
                send(rank.wrapper, signal.SIGCONT)
        for group in silent:
            self._tell_unrecorded(group, ranks_of(ranks, [group.name]), ours)

    def _is_told(self, group: GroupStatus) -> bool:
        """Whether all ranks of a group got the signal, or need none."""
        by_records = self._believed.get(group.folder, 0) >= group.nproc
        return group.folder in self._early or by_records or group.main in self._told

    def _tell_unrecorded(self, group: GroupStatus, ranks: Sequence[RankRecord], ours: Set[Process]) -> None:
        """Signals ranks without a record through their wrappers: the launcher's children, which pass the signal on."""
        believed = [rank for rank in ranks if rank.code is not None or rank.program in ours]
        self._believed[group.folder] = len(believed)
        if len(believed) >= group.nproc or group.main is None:
            return
        self._told.add(group.main)
        recorded = {process for rank in believed for process in (rank.program, rank.wrapper)}
        for process in ours - recorded:
            stat = read_stat(process.pid)
            if stat is not None and stat.parent == group.main.pid:
                self._tell(process, ours)

    def _tell(self, process: Process, ours: Set[Process], *, group: bool = False) -> None:
        self._told.add(process)
        if process in ours:
            if not self._flagged:
                send(process, signal.SIGTERM)
            send(process, signal.SIGCONT, group=group)


def _term(process: Process) -> None:
    send(process, signal.SIGTERM)
    send(process, signal.SIGCONT)


def kill_ranks(running: Running) -> None:
    """Kills the programs, each with its process group; their wrappers stay and record the end."""
    programs = {rank.program for rank in running.ranks() if rank.code is None}
    for process in programs & set(running.leftovers()) if programs else ():
        send(process, signal.SIGKILL, group=True)
