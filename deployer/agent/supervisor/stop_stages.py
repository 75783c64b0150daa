"""The stages of a stop: flag or TERM for the ranks, the grace, TERM for torchrun, KILL for all.

torchrun hears nothing before the grace is over: it kills its ranks 30 s after its own TERM, however long they save.
Stdlib only, Python 3.8, Linux.
"""

import signal
import time
from typing import Callable, List, Optional, Sequence, Set

from ..host.killing import Subreaper, kill_all
from ..host.processes import Process, read_stat, send
from ..job.ending import RankRecord
from ..job.stop import StopRequest

LAUNCHER_S = 10.0
"""How long torchrun may take to end after its TERM, and everything again after KILL."""


class Stopping:
    """One stop under way. `phase`: stopping (the grace), ending (torchrun was told), killing, given up."""

    def __init__(
        self,
        launcher: Optional[Process],
        ranks: Callable[[], Sequence[RankRecord]],
        leftovers: Callable[[], List[Process]],
        *,
        nproc: int,
        subreaper: Subreaper,
        flagged: bool,
        early: bool,
    ) -> None:
        """`flagged`: the ranks poll the stop flag themselves; others get TERM. `early`: not all ranks had started, so
        there is nothing to save and torchrun is told at once."""
        self._nproc = nproc
        self.phase = "stopping"
        self._launcher = launcher
        self._ranks = ranks
        self._leftovers = leftovers
        self._subreaper = subreaper
        self._flagged = flagged
        self._early = early
        self.seen: Set[Process] = set()
        """The job's processes, as they were found at each phase's beginning."""
        self._told: Set[Process] = set()
        self._believed = 0  # records that name processes of the job
        self._request: Optional[StopRequest] = None
        self._deadline = 0.0
        self._phase_ends = 0.0

    def left_s(self) -> float:
        """What is left of the grace, in seconds."""
        return max(0.0, self._deadline - time.monotonic())

    def advance(self, request: StopRequest) -> str:
        """Does what is due now and returns the phase; called again and again until the job has ended."""
        if request != self._request:
            if self._request is None:
                self.seen.update(self._leftovers())
            self._request = request
            self._deadline = min(request.deadline_mono, time.monotonic() + request.grace_s)
        if request.force and self.phase in ("stopping", "ending"):
            self._enter("killing")
        self._tell_ranks()
        if self.phase == "stopping" and (self._early or self.left_s() == 0):
            self._enter("ending")
            if self._launcher is not None:
                _term(self._launcher)
        if self.phase != "stopping" and not self._flagged and self.left_s() == 0:
            kill_ranks(self._ranks(), self._leftovers)  # they have had their TERM and the whole grace
        if self.phase in ("ending", "killing") and time.monotonic() >= max(self._phase_ends, self._deadline):
            self._enter("killing" if self.phase == "ending" else "given up")
        if self.phase == "killing":
            self.seen.update(kill_all(self._leftovers, subreaper=self._subreaper))
        return self.phase

    def _enter(self, phase: str) -> None:
        self.phase = phase
        self._phase_ends = time.monotonic() + LAUNCHER_S
        self.seen.update(self._leftovers())

    def _tell_ranks(self) -> None:
        """TERM for ranks that poll no flag; one that was halted goes on, or it could neither poll nor save."""
        if self._request is None or self._request.force:
            return
        ranks = self._ranks()
        new = [r for r in ranks if r.code is None and not {r.program, r.wrapper} & self._told]
        if not new and (self._early or self._believed >= self._nproc or self._launcher in self._told):
            return
        ours = set(self._leftovers())  # a record may be another job's, or older than a pid that was given away
        for rank in new:
            self._tell(rank.program, ours, group=True)
            if rank.wrapper in ours:
                send(rank.wrapper, signal.SIGCONT)
        believed = [rank for rank in ranks if rank.code is not None or rank.program in ours]
        self._believed = len(believed)
        if self._believed < self._nproc and not self._early and self._launcher is not None:
            self._told.add(self._launcher)
            recorded = {process for rank in believed for process in (rank.program, rank.wrapper)}
            for process in ours - recorded:  # the launcher's children are wrappers, which hand it on
                stat = read_stat(process.pid)
                if stat is not None and stat.parent == self._launcher.pid:
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


def kill_ranks(ranks: Sequence[RankRecord], leftovers: Callable[[], List[Process]]) -> None:
    """The programs, each with its process group; their wrappers stay and record it."""
    running = {rank.program for rank in ranks if rank.code is None}
    for process in running & set(leftovers()) if running else ():
        send(process, signal.SIGKILL, group=True)
