"""Detects an attempt without progress, and describes it before it is ended.

Stdlib only, Python 3.8: this package runs on the host.
"""

import time
from typing import TYPE_CHECKING, Any, Callable, Optional, Sequence, Tuple

from ..host.layout import Job
from ..host.processes import is_running
from ..job import progress
from ..job.ending import Ending, RankRecord
from ..job.plan import Plan, is_trainer
from ..job.status import FAILED, StalledRank
from ..job.stop import StopRequest, new_stop
from .running import Running

if TYPE_CHECKING:
    from ..unattended.event import Name
    from ..unattended.idle import IdleGpus

STALL_CODE = 124
"""The exit code of a stalled attempt, as in `timeout`."""
STALL_GRACE_S = 5.0
"""Seconds between TERM and KILL for a stalled attempt."""


class StallWatch:
    """Checks whether a value that shows progress has changed within `timeout_s`."""

    def __init__(self, look: Callable[[], Any], timeout_s: float, *, now: Callable[[], float] = time.monotonic) -> None:
        self._look = look
        self._timeout_s = timeout_s
        self._every_s = min(1.0, timeout_s / 10)
        self._now = now
        self._seen: Any = look()
        self._changed = self._looked = now()

    def is_stalled(self) -> bool:
        """Whether it has not changed. Call it often: it reads the value at most once a second."""
        now = self._now()
        if now < self._looked + self._every_s:
            return False
        self._looked = now
        seen = self._look()
        if seen != self._seen:
            self._seen, self._changed = seen, now
        return now >= self._changed + self._timeout_s


class Stall:
    """One attempt's stall: its `ending` once it is found, the `request` to stop it, and what the `ranks` did at that
    time."""

    def __init__(self, job: Job, attempt: int, plan: Plan, running: Running, idle: "Optional[IdleGpus]" = None) -> None:
        """`idle`: watches the utilization of its GPUs."""
        self.ending: Optional[Ending] = None
        self.event: "Name" = "stall"
        self.request: Optional[StopRequest] = None
        self.ranks: Tuple[StalledRank, ...] = ()
        self._job = job
        self._attempt = attempt
        self._running = running
        self._is_trainer = is_trainer(plan)
        self._timeout_s = plan.policy.stall_timeout_s
        self._watch: Optional[StallWatch] = None
        self._idle = idle

    def find(self) -> bool:
        """Whether the attempt has stalled; True only once, and never before all its groups count as running."""
        if self.ending is not None:
            return False
        self.ending = self._no_progress() or self._no_use()
        if self.ending is None:
            return False
        self.ranks = describe_ranks(self._job, self._attempt, self._running.ranks())
        self.request = new_stop(STALL_GRACE_S)
        return True

    def close(self) -> None:
        if self._idle is not None:
            self._idle.close()

    def _no_progress(self) -> Optional[Ending]:
        if self._timeout_s is None:
            return None
        if self._watch is None:
            self._watch = StallWatch(self._mark, self._timeout_s)
        if not self._watch.is_stalled():
            return None
        return stalled_ending(self._job, self._timeout_s, is_trainer=self._is_trainer)

    def _no_use(self) -> Optional[Ending]:
        if self._idle is None or self._running.unready() or not self._idle.look():
            return None
        self.event = "idle"
        return idle_ending(self._idle.labels, self._idle.timeout_s)

    def _mark(self) -> Any:
        """A value that changes with the job's progress, and constantly before it runs."""
        if self._running.unready():
            return time.monotonic()
        if self._is_trainer:
            return progress.trainer_fingerprint(self._job)
        return progress.output_fingerprint(self._job, self._attempt)


def stalled_ending(job: Job, timeout_s: float, *, is_trainer: bool) -> Ending:
    if not is_trainer:
        return Ending(FAILED, STALL_CODE, "no output for %s" % duration(timeout_s))
    step = progress.last_step(job)
    where = "last step %d" % step if step is not None else "before the first step"
    return Ending(FAILED, STALL_CODE, "no step for %s (%s)" % (duration(timeout_s), where))


def idle_ending(labels: Sequence[str], timeout_s: float) -> Ending:
    from ..unattended.idle import IDLE_BELOW

    gpus, were = (labels[0], "was") if len(labels) == 1 else (",".join(labels), "were")
    what = "GPU%s %s %s idle (below %d %%) for %s"
    plural = "" if len(labels) == 1 else "s"
    return Ending(FAILED, STALL_CODE, what % (plural, gpus, were, IDLE_BELOW, duration(timeout_s)))


def describe_ranks(job: Job, attempt: int, ranks: Sequence[RankRecord]) -> Tuple[StalledRank, ...]:
    """Which ranks still ran, and the last log line of each."""
    return tuple(
        StalledRank(
            rank.rank,
            rank.pid,
            running=rank.code is None and is_running(rank.program),
            last_line=progress.last_line(job, rank.rank, attempt, rank.group),
            group=rank.group.folder,
        )
        for rank in ranks
    )


def duration(seconds: float) -> str:
    """A duration as in --max-runtime: `1h30m`, `10m`, `45s`, `2.5s`."""
    text, rest = "", float(seconds)
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if rest >= length:
            text += "%d%s" % (rest // length, unit)
            rest %= length
    return text + "%gs" % rest if rest or not text else text
