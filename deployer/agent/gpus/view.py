"""Why a job waits for its GPUs, and what still holds those of a job that was stopped: as a status keeps it.

Stdlib only, Python 3.8: both ends use it, and a job without GPUs loads nothing else of this folder.
"""

from typing import NamedTuple, Optional, Tuple


class Block(NamedTuple):
    """A GPU that is not free: by whose job it is held, or else which processes are using it."""

    gpu: str
    job: str = ""
    user: str = ""
    since: float = 0.0
    """Unix time."""
    locker: str = ""
    """Who locks the lease, where that is not the job's user."""
    using: str = ""


class Waiter(NamedTuple):
    """A job in the queue."""

    job: str
    user: str


class QueueView(NamedTuple):
    """Where a job stands in the queue, what holds each GPU that it wants, and which jobs come before it."""

    position: int = 0
    """0 until somebody could look."""
    wants: str = ""
    held: Tuple[Block, ...] = ()
    before: Tuple[Waiter, ...] = ()
    trouble: str = ""
    """What keeps the host from looking."""


class GpuHolder(NamedTuple):
    """What still holds a GPU of a stopped job. `pid` is None for memory that no process seen here explains."""

    gpu: int
    pid: Optional[int] = None
    command: str = ""
    memory_mib: int = 0
