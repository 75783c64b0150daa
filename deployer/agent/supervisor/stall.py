"""An attempt that makes no progress: noticed, and described before it is ended.

Stdlib only, Python 3.8: this package runs on the host.
"""

import time
from typing import Any, Callable, Optional, Sequence, Tuple

from ..host.layout import Job
from ..host.processes import is_running
from ..job import progress
from ..job.ending import Ending, RankRecord
from ..job.plan import Plan, is_trainer, main_role
from ..job.status import FAILED, StalledRank

STALL_CODE = 124
"""Of a stalled attempt, as `timeout` ends."""
STALL_GRACE_S = 5.0
"""What a stalled attempt gets after TERM before it is killed."""


class StallWatch:
    """Looks whether anything that counts as progress has changed within `timeout_s`."""

    def __init__(self, look: Callable[[], Any], timeout_s: float, *, now: Callable[[], float] = time.monotonic) -> None:
        self._look = look
        self._timeout_s = timeout_s
        self._every_s = min(1.0, timeout_s / 10)
        self._now = now
        self._seen: Any = look()
        self._changed = self._looked = now()

    def is_stalled(self) -> bool:
        """Cheap enough to ask at every turn: it looks once a second at most."""
        now = self._now()
        if now < self._looked + self._every_s:
            return False
        self._looked = now
        seen = self._look()
        if seen != self._seen:
            self._seen, self._changed = seen, now
        return now >= self._changed + self._timeout_s


class Stall:
    """What is known of one attempt's stall: its `ending` once one was found, and what the `ranks` did then."""

    def __init__(self, job: Job, attempt: int, plan: Plan, ranks: Callable[[], Sequence[RankRecord]]) -> None:
        self.ending: Optional[Ending] = None
        self.ranks: Tuple[StalledRank, ...] = ()
        self._job = job
        self._attempt = attempt
        self._read_ranks = ranks
        self._nproc = main_role(plan).nproc
        self._is_trainer = is_trainer(plan)
        self._timeout_s = plan.policy.stall_timeout_s
        self._watch: Optional[StallWatch] = None

    def find(self) -> bool:
        """Whether the attempt has stalled, told once. Never before all its ranks run."""
        if self._timeout_s is None or self.ending is not None:
            return False
        if self._watch is None:
            self._watch = StallWatch(self._mark, self._timeout_s)
        if not self._watch.is_stalled():
            return False
        self.ending = stalled_ending(self._job, self._timeout_s, is_trainer=self._is_trainer)
        self.ranks = describe_ranks(self._job, self._attempt, self._read_ranks())
        return True

    def _mark(self) -> Any:
        """Changes with the job's progress, and all the time before its ranks run."""
        if len(self._read_ranks()) < self._nproc:
            return time.monotonic()
        if self._is_trainer:
            return progress.trainer_mark(self._job)
        return progress.output_mark(self._job, self._attempt)


def stalled_ending(job: Job, timeout_s: float, *, is_trainer: bool) -> Ending:
    if not is_trainer:
        return Ending(FAILED, STALL_CODE, "no output for %s" % duration(timeout_s))
    step = progress.last_step(job)
    where = "last step %d" % step if step is not None else "before the first step"
    return Ending(FAILED, STALL_CODE, "no step for %s (%s)" % (duration(timeout_s), where))


def describe_ranks(job: Job, attempt: int, ranks: Sequence[RankRecord]) -> Tuple[StalledRank, ...]:
    """Which ranks still ran, and what each said last."""
    return tuple(
        StalledRank(
            rank.rank,
            rank.pid,
            running=rank.code is None and is_running(rank.program),
            last_line=progress.last_line(job, rank.rank, attempt, rank.group),
        )
        for rank in ranks
    )


def duration(seconds: float) -> str:
    """`1h30m`, `10m`, `45s`, `2.5s`, as it is given to --max-runtime."""
    text, rest = "", float(seconds)
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if rest >= length:
            text += "%d%s" % (rest // length, unit)
            rest %= length
    return text + "%gs" % rest if rest or not text else text
