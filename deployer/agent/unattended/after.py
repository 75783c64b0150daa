"""--after: polls the jobs that a job waits for, and decides whether it may start.

Stdlib only, Python 3.8, Linux.
"""

import os
import time
from typing import Callable, Dict, NamedTuple, Optional, Sequence, Tuple

from ..host.layout import Root
from ..job.judge import judge
from ..job.status import FAILED, FINAL, LOST, STOPPED, SUCCEEDED, Status

POLL_S = 1.0
"""Seconds between two checks by a waiting job; each usually reads one file per awaited job."""
SEARCH_S = 10.0
"""Seconds between two checks while an awaited job has no supervisor: then each one reads all processes."""
MAX_WORDS = 200


class AfterDecision(NamedTuple):
    """`awaited`: jobs that have not ended; if empty, the job starts. `refusal`: why the job can never start.
    `failed_job`: the ID of the job that prevents it."""

    awaited: Tuple[str, ...] = ()
    refusal: str = ""
    failed_job: str = ""


def decide(found: Sequence[Tuple[str, Status]]) -> AfterDecision:
    """`found`: each awaited job with its current status. Of a job that was started again, the current attempt
    counts."""
    for job_id, status in found:
        if status.state in FINAL and status.state != SUCCEEDED:
            return AfterDecision(refusal="after %s, which %s" % (job_id, how_it_ended(status)), failed_job=job_id)
    return AfterDecision(tuple(job_id for job_id, status in found if status.state != SUCCEEDED))


def how_it_ended(status: Status) -> str:
    """How a job that has not succeeded ended, as text that completes `ID, which …`."""
    if status.state == FAILED and status.after:
        return "never started (%s)" % status.reason[:MAX_WORDS]
    ends = {
        FAILED: "failed with code %s" % status.code,
        STOPPED: "was stopped",
        LOST: "is lost: %s" % status.reason[:MAX_WORDS],
    }
    return ends.get(status.state, "is %s" % status.state)


class AwaitedJobs:
    """The jobs that a job waits for. Call `poll` often: it reads them only when it is time to."""

    def __init__(self, root: Root, ids: Sequence[str], *, now: Callable[[], float] = time.monotonic) -> None:
        self._jobs = {job_id: root.job(job_id) for job_id in ids}
        self._seen: Dict[str, Status] = {}
        self._now = now
        self._next_at = float("-inf")

    def poll(self) -> Optional[AfterDecision]:
        """The decision; None if it is not time to check. If a job cannot be read, its last status counts; without one
        it is still awaited."""
        if self._now() < self._next_at:
            return None
        for job_id, job in self._jobs.items():
            try:
                status = judge(job)
            except OSError:
                continue
            if not self._was_collected(job_id, status):
                self._seen[job_id] = status
        lonely = any(status.unsupervised for status in self._seen.values())
        self._next_at = self._now() + (SEARCH_S if lonely else POLL_S)
        unread = tuple(job_id for job_id in self._jobs if job_id not in self._seen)
        decision = decide(list(self._seen.items()))
        return decision if decision.refusal else decision._replace(awaited=(*decision.awaited, *unread))

    def _was_collected(self, job_id: str, status: Status) -> bool:
        """Whether the job succeeded earlier and its folder is gone now: gc may remove it."""
        seen = self._seen.get(job_id)
        succeeded = seen is not None and seen.state == SUCCEEDED
        return succeeded and status.state == LOST and not os.path.isdir(self._jobs[job_id].path)
