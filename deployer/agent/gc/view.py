"""What a collection tells whoever asked for it.

Stdlib only, Python 3.8: both ends use it.
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
    """What nobody has brought home of it; None where nobody has looked."""


class RemovedObjects(NamedTuple):
    """Whatever else goes, of one kind."""

    kind: str
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody needs
    size_bytes: int
    oldest_s: float
    """Seconds since the oldest was touched."""


class KeptJobs(NamedTuple):
    what: str
    """Why."""
    count: int  # type: ignore[assignment]
    size_bytes: int
    oldest_s: Optional[float] = None


class GcReport(NamedTuple):
    """What goes or went, why other jobs stay, and how much room there is now."""

    jobs: Tuple[RemovedJob, ...]
    rest: Tuple[RemovedObjects, ...]
    total_bytes: int
    kept_jobs: Tuple[KeptJobs, ...]
    remaining: Tuple[str, ...]
    """What could not be removed."""
    free_bytes: int
    root: str
