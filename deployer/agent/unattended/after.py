"""Whether a job that is to start after others may start: a decision on how those are, and who looks at them.

Stdlib only, Python 3.8, Linux.
"""

import os
import time
from typing import Callable, Dict, NamedTuple, Optional, Sequence, Tuple

from ..host.layout import Root
from ..job.judge import judge
from ..job.status import FAILED, FINAL, LOST, STOPPED, SUCCEEDED, Status

POLL_S = 1.0
"""So often a waiting job looks at the others: a read of a file each, as a rule."""
SEARCH_S = 10.0
"""And so often while one of them has no supervisor: then all processes are looked through."""
MAX_WORDS = 200


class AfterDecision(NamedTuple):
    """It waits for the jobs in `awaited`; with none it starts. `refusal`: why it never does, for `failed_job`."""

    awaited: Tuple[str, ...] = ()
    refusal: str = ""
    failed_job: str = ""


def decide(found: Sequence[Tuple[str, Status]]) -> AfterDecision:
    """`found`: each of the others as it is now. One that was started again counts as what it is by now."""
    for job_id, status in found:
        if status.state in FINAL and status.state != SUCCEEDED:
            return AfterDecision(refusal="after %s, which %s" % (job_id, how_it_ended(status)), failed_job=job_id)
    return AfterDecision(tuple(job_id for job_id, status in found if status.state != SUCCEEDED))


def how_it_ended(status: Status) -> str:
    """Of a job that has not succeeded: what completes `ID, which …`."""
    if status.state == FAILED and status.after:
        return "never started (%s)" % status.reason[:MAX_WORDS]
    ends = {
        FAILED: "failed with code %s" % status.code,
        STOPPED: "was stopped",
        LOST: "is lost: %s" % status.reason[:MAX_WORDS],
    }
    return ends.get(status.state, "is %s" % status.state)


class AwaitedJobs:
    """The jobs that one waits for. To be asked at every turn: it looks no more often than is due."""

    def __init__(self, root: Root, ids: Sequence[str], *, now: Callable[[], float] = time.monotonic) -> None:
        self._jobs = {job_id: root.job(job_id) for job_id in ids}
        self._seen: Dict[str, Status] = {}
        self._now = now
        self._next_at = float("-inf")

    def poll(self) -> Optional[AfterDecision]:
        """None where it is not time to look. A job that cannot be read now is as it was seen last, or waited for."""
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
        """Whether it was seen to succeed and is gone since: gc may take it, for nobody waits for it any more."""
        seen = self._seen.get(job_id)
        succeeded = seen is not None and seen.state == SUCCEEDED
        return succeeded and status.state == LOST and not os.path.isdir(self._jobs[job_id].path)
