"""What a host says of a job to who asks: as `status` shows it, as `ps` lists it, and how a stop went.

Stdlib only, Python 3.8: both ends use it.
"""

from typing import Any, Dict, NamedTuple, Optional, Tuple

from ..gpus.view import QueueView
from .status import State, Status


class OfJob(NamedTuple):
    """A question about one job."""

    job: str


class Ack(NamedTuple):
    """The host has the job; this very call has started it, or not."""

    job_id: str
    path: str
    already: bool = False
    queued: bool = False
    stopping: bool = False
    """It was called off just after its start, and is being stopped."""
    attempt: Optional[int] = None
    """Of a resume."""
    from_step: Optional[int] = None


class SlotValues(NamedTuple):
    """What a plan's slots would be filled with."""

    slots: Dict[str, str]
    no_python: str = ""
    """Why an environment would be built, whose interpreter is not known yet."""


class PlanView(NamedTuple):
    """What a client needs to resume a job."""

    job_id: str
    plan: Dict[str, Any]
    attempt: int
    from_step: Optional[int] = None
    """The newest complete checkpoint; None without one."""


class Processes(NamedTuple):
    """A role's processes on one node."""

    role: str
    """Empty where nothing names it: of a job whose plan is lost."""
    node: int
    ranks: Tuple[int, ...]
    """All of a job's only group; of several groups those that have a log by now."""


class JobView(NamedTuple):
    """One job with its whole id; the end of a log that was followed, too."""

    job_id: str
    status: Status
    path: str = ""
    processes: Tuple[Processes, ...] = ()
    """By role and node."""
    latest: Optional[str] = None
    """The last line of metrics.jsonl."""
    silent_s: Optional[float] = None
    """Since any rank wrote to its log; None before the first byte."""


class StopReport(NamedTuple):
    """A job that was stopped, or had ended: `was` is its state before."""

    job_id: str
    status: Status
    was: State
    gone: bool = False
    """Its folder is, and nothing of it runs."""


class Row(NamedTuple):
    """One job as `ps` lists it."""

    id: str
    state: State
    code: Optional[int] = None
    reason: str = ""
    on_host: str = ""
    attempt: int = 0
    max_attempts: int = 0
    queue: Optional[QueueView] = None
    after: Tuple[str, ...] = ()
    """As in Status."""
    damaged: str = ""
    started_at: Optional[str] = None
    ended_at: Optional[str] = None
    unsupervised: bool = False
    name: str = ""
    kind: Optional[str] = None
    created: str = ""
    age_s: Optional[float] = None
    """Since it was made, by the host's clock; the client's may differ."""
    gpus: Tuple[str, ...] = ()
    nproc: Optional[int] = None
    host: Optional[str] = None
    """Where its supervisor runs or ran."""
    step: Optional[int] = None
