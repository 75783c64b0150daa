"""Watches a running attempt: its stop, a stall, the effect of a failure on other ranks, memory, logs.

Stdlib only, Python 3.8, Linux.
"""

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Callable, Dict, List, Optional, Sequence, Tuple

from ..host.killing import Subreaper
from ..job.ending import Evidence, OomKill, read_outcome, read_ranks
from ..job.plan import Plan, is_trainer
from ..job.status import GroupStatus
from ..logs.keep import LogKeeper
from .running import Running
from .stall import Stall
from .stop_stages import Stopping, kill_ranks
from .turn import Hook, Turn

if TYPE_CHECKING:
    from ..host.cgroups import OomWatch
    from ..job.host_resources import ResourceMonitor
    from ..unattended.idle import IdleGpus

Places = Callable[[], Dict[str, str]]
SIBLINGS_S = 5.0
"""Seconds between a trainer's first failure, in whichever group, and the kill of all other ranks."""


class Watch:
    """Watches one attempt from its start to its end. `stop`: the running stop; `stall`: the stall, if there is one."""

    def __init__(
        self,
        turn: Turn,
        plan: Plan,
        number: int,
        running: Running,
        where: Places,
        idle: "Optional[IdleGpus]" = None,
    ) -> None:
        """`where`: the job's file systems, see host_resources.places. `idle`: watches the utilization of its GPUs."""
        self.stop: Optional[Stopping] = None
        self.stall = Stall(turn.job, number, plan, running, idle)
        self._turn = turn
        self._number = number
        self._running = running
        self._is_trainer = is_trainer(plan)
        self._failed_at: Optional[float] = None
        self._host = _HostWatch(running, where, has_gpus=bool(turn.status.now.devices))
        self._logs = _Logs(turn, plan, number, running.groups)
        looks = [self._find_stall, self._drive_stop, self._kill_siblings, self._host.look, self._logs.look]
        self._hooks: List[Hook] = looks if turn.tell is None else [self._tell_start, *looks]
        self._has_begun = False

    def to_the_end(self) -> Evidence:
        """Returns when the attempt has ended, or cannot be ended, with all facts about how it ended."""
        while not self._running.has_ended(all_roles=self.stop is not None):
            for hook in self._hooks:
                hook()
            if self.stop is not None and self.stop.phase == "given up":
                break
            self._turn.wait()
        self.stall.close()
        if self._turn.tell is not None and self._running.ranks():
            self._tell_start(any_rank=True)
        self._logs.look(now=True)
        job = self._turn.job
        return Evidence(
            ranks=read_ranks(job, self._number),
            groups=self._running.ends(),
            stop=self._turn.stop_state.read(),
            outcome=read_outcome(job),
            stalled=self.stall.ending,
            oom_kill=self._host.oom_kill(),
        )

    def host_at_start(self) -> "ResourceMonitor":
        """The host's resources since the start."""
        self._host.look()
        assert self._host.monitor is not None
        return self._host.monitor

    def _tell_start(self, *, any_rank: bool = False) -> None:
        """Sends the event `start` once all ranks have started; with `any_rank`, if any rank has, for an attempt that
        ended sooner."""
        if not self._has_begun and self._turn.tell is not None and (any_rank or not self._running.unready()):
            self._has_begun = True
            self._turn.tell("start")

    def _find_stall(self) -> None:
        if self.stop is None and self.stall.find():
            self._turn.status.save(stalled=self.stall.ranks)
            if self._turn.tell is not None:
                self._turn.tell(self.stall.event, self.stall.ending)

    def _drive_stop(self) -> None:
        """Carries out a requested stop, or ends a stalled attempt. For a stall there is no stop file, because the job
        may restart."""
        request = self._turn.stop_state.read() or self.stall.request
        if request is None:
            return
        if self.stop is None:
            flagged = self._is_trainer and self.stall.request is None and self._turn.stop_state.is_flagged()
            subreaper = Subreaper(self._turn.job, self._turn.children.reap, self._turn.apart)
            self.stop = Stopping(self._running, subreaper=subreaper, flagged=flagged)
        phase = self.stop.advance(request)
        if phase != self._turn.status.now.phase:
            self._turn.status.save(phase=phase, grace_s=request.grace_s)

    def _kill_siblings(self) -> None:
        if not self._is_trainer:
            return
        if self._failed_at is None and self.stop is None and self._running.has_failed():
            self._failed_at = time.monotonic()
        if self._failed_at is not None and time.monotonic() >= self._failed_at + SIBLINGS_S:
            kill_ranks(self._running)


class _HostWatch:
    """The host's resources during the attempt, and whether the kernel has killed a process for lack of memory."""

    def __init__(self, running: Running, where: Places, *, has_gpus: bool) -> None:
        self.monitor: "Optional[ResourceMonitor]" = None
        self._running = running
        self._where = where
        self._has_gpus = has_gpus
        self._oom: "Optional[OomWatch]" = None

    def look(self) -> None:
        if self._oom is None or self.monitor is None:
            self._oom, self.monitor = self._load_the_rest()
        if not self._running.has_failed():
            self._oom.sample()
            if self.monitor.sample():
                with suppress(ImportError):  # our own files may be gone: an end is told without causes then
                    self._load_failure_analysis()

    def oom_kill(self) -> Optional[OomKill]:
        oom = self._oom
        return OomKill(oom.REASON, oom.HINT) if oom is not None and oom.has_killed() else None

    def _load_the_rest(self) -> "Tuple[OomWatch, ResourceMonitor]":
        """Loads what only the attempt's end needs: the job has already started, and our own files may be gone later."""
        from ..host.cgroups import OomWatch
        from ..job.host_resources import ResourceMonitor
        from . import restarts  # noqa: F401

        if self._has_gpus:
            from ..gpus import freed  # noqa: F401
        return OomWatch(), ResourceMonitor(self._where())

    def _load_failure_analysis(self) -> None:
        """Loads the analysis of failures, later than the rest: it takes longer, and the job is only starting."""
        from ..job import failure  # noqa: F401

        if self._has_gpus:
            from ..gpus import health  # noqa: F401


class _Logs:
    """Maintains every log folder of an attempt; writes a warning into the status if a limit cannot be kept."""

    def __init__(self, turn: Turn, plan: Plan, number: int, groups: Sequence[GroupStatus]) -> None:
        folders = {"", *(group.folder for group in groups)}  # the preparation has none
        limit = plan.policy.log_max_bytes
        self._keepers = [LogKeeper(turn.job.logs(number, folder), limit) for folder in sorted(folders)]
        self._status = turn.status

    def look(self, *, now: bool = False) -> None:
        for keeper in self._keepers:
            warning = keeper.look(now=now)
            if warning is not None:
                self._status.save(warnings=(*self._status.now.warnings, warning))
