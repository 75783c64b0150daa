"""A host's answers about a job: for `status`, for `ps`, and on how a stop went.

Stdlib only, Python 3.8: both sides use it.
"""

from typing import Any, Dict, NamedTuple, Optional, Tuple

from ..gpus.view import GpuLoad, QueueView
from .status import State, Status


class OfJob(NamedTuple):
    """A request about one job."""

    job: str


class Ack(NamedTuple):
    """The host's acknowledgement: it has the job, and whether this very call has started it."""

    job_id: str
    path: str
    already: bool = False
    queued: bool = False
    stopping: bool = False
    """The launch was cancelled just after the start, and the job is being stopped."""
    attempt: Optional[int] = None
    """The attempt of a resume."""
    from_step: Optional[int] = None


class SlotValues(NamedTuple):
    """The values that a plan's slots would get."""

    slots: Dict[str, str]
    no_python: str = ""
    """Why an environment would be built, so that the interpreter is not known yet."""


class PlanView(NamedTuple):
    """What a client needs to resume a job."""

    job_id: str
    plan: Dict[str, Any]
    attempt: int
    from_step: Optional[int] = None
    """The newest complete checkpoint; None without one."""


class OriginalView(NamedTuple):
    """What a client needs to launch a job again."""

    job_id: str
    plan: Dict[str, Any]
    whole: bool = False
    """Whether all its files are on the host."""


class Processes(NamedTuple):
    """A role's processes on one node."""

    role: str
    """Empty if the role is not known, because the job's plan is lost."""
    node: int
    ranks: Tuple[int, ...]
    """All ranks of a job's only group; of several groups, those that have a log so far."""


class JobView(NamedTuple):
    """One job with its whole ID; also the end of a followed log."""

    job_id: str
    status: Status
    path: str = ""
    processes: Tuple[Processes, ...] = ()
    """By role and node."""
    latest: Optional[str] = None
    """The last line of metrics.jsonl."""
    silent_s: Optional[float] = None
    """Seconds since any rank wrote to its log; None before the first byte."""


class StopReport(NamedTuple):
    """A job that was stopped, or had already ended: `was` is its state before."""

    job_id: str
    status: Status
    was: State
    gone: bool = False
    """Its folder is gone, and none of its processes runs."""


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
    """Seconds since its creation, by the host's clock; the client's may differ."""
    gpus: Tuple[str, ...] = ()
    nproc: Optional[int] = None
    host: Optional[str] = None
    """The host on which its supervisor runs or ran."""
    step: Optional[int] = None
    steps: Optional[int] = None
    """The total number of steps."""
    loss: Optional[float] = None
    step_s: Optional[float] = None
    """Seconds of a recent step."""
    command: str = ""
    """The beginning of a program's command; empty for the trainer."""
    ran_s: Optional[float] = None
    """Seconds for which its last attempt has run, or ran, by the host's clock."""


class GlanceRequest(NamedTuple):
    """A request for one job's current state, with what the client already has."""

    job: str
    metrics_file: str = ""
    metrics_from: int = 0
    log_mark: str = ""
    whole: bool = False
    """Also send the complete last line of the metrics."""


class NewMetrics(NamedTuple):
    """New content of metrics.jsonl: some values of some of its lines."""

    records: Tuple[Dict[str, float], ...] = ()
    file: str = ""
    to: int = 0
    """The offset for the next request."""
    anew: bool = False
    """The client's earlier values are from another file."""


class Glance(NamedTuple):
    """A job, its host's GPUs, and what is new."""

    row: Row
    gpus: Tuple[GpuLoad, ...] = ()
    no_gpus: str = ""
    """Why no GPUs are shown."""
    metrics: NewMetrics = NewMetrics()
    log: Optional[str] = None
    """Its last log lines; None if they have not changed."""
    log_mark: str = ""
    latest: Optional[str] = None
