"""The report of `gc` to the client.

Stdlib only, Python 3.8: both sides use it.
"""

from typing import NamedTuple, Optional, Tuple

from ..requests.files.view import UnpulledFiles


class RemovedJob(NamedTuple):
    """An ended job that `gc` removes, or has removed."""

    id: str
    size_bytes: int
    ended_s: Optional[float] = None
    """Seconds since it ended."""
    unfetched: Optional[UnpulledFiles] = None
    """The job's files that were never copied to a client; None if this was not checked."""


class RemovedObjects(NamedTuple):
    """The removed objects of one kind."""

    kind: str
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody needs
    size_bytes: int
    oldest_s: float
    """Seconds since the oldest object was touched."""


class KeptJobs(NamedTuple):
    what: str
    """Why they stay."""
    count: int  # type: ignore[assignment]
    size_bytes: int
    oldest_s: Optional[float] = None


class GcReport(NamedTuple):
    """What is or would be removed, why other jobs stay, and the free space."""

    jobs: Tuple[RemovedJob, ...]
    rest: Tuple[RemovedObjects, ...]
    total_bytes: int
    kept_jobs: Tuple[KeptJobs, ...]
    remaining: Tuple[str, ...]
    """Paths that could not be removed."""
    free_bytes: int
    root: str
