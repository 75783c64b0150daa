"""What a host says of a job to who asks: as `status` shows it, as `ps` lists it, and how a stop went.

Stdlib only, Python 3.8: both ends use it.
"""

from typing import Any, Dict, NamedTuple, Optional, Tuple

from ..gpus.view import GpuLoad, QueueView
from .status import State, Status


class OfJob(NamedTuple):
    """A request about one job."""

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


class OriginalView(NamedTuple):
    """What a client needs to launch a job again."""

    job_id: str
    plan: Dict[str, Any]
    whole: bool = False
    """All its files are there to begin from."""


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
    steps: Optional[int] = None
    """How many there will be."""
    loss: Optional[float] = None
    step_s: Optional[float] = None
    """Seconds of a recent step."""
    command: str = ""
    """The beginning of a program's words; empty for the trainer."""
    ran_s: Optional[float] = None
    """How long its last attempt has run, or ran, by the host's clock."""


class GlanceRequest(NamedTuple):
    """A look at one job, by one who knows what an earlier look has shown."""

    job: str
    metrics_file: str = ""
    metrics_from: int = 0
    log_mark: str = ""
    whole: bool = False
    """The last line of the metrics too, with all that stands in it."""


class NewMetrics(NamedTuple):
    """What has come to metrics.jsonl: some numbers of some of its lines."""

    records: Tuple[Dict[str, float], ...] = ()
    file: str = ""
    to: int = 0
    """Where the next look begins."""
    anew: bool = False
    """What was known before is of another file."""


class Glance(NamedTuple):
    """A job, its host's GPUs, and what is new."""

    row: Row
    gpus: Tuple[GpuLoad, ...] = ()
    no_gpus: str = ""
    """Why there are none."""
    metrics: NewMetrics = NewMetrics()
    log: Optional[str] = None
    """Its last lines; None where they are as before."""
    log_mark: str = ""
    latest: Optional[str] = None
