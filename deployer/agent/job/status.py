"""A job's status: the supervisor's facts about it, as in status.json and in every command.

States: queued, preparing, running, succeeded, failed, stopped, lost. `judge` finds the true one.
Stdlib only, Python 3.8: both sides use it.
"""

import os
import time
from typing import Any, Dict, Literal, NamedTuple, Optional, Tuple

from ..gpus.view import GpuHolder, QueueView
from ..host.files import read_whole, write_json
from ..host.layout import ALONE, GroupName, Job
from ..host.machine import Identity
from ..host.processes import Process, Survivor
from ..host.typed import MAX_BYTES, InvalidData, from_json, load_json, to_json
from .plan import Plan, wanted_gpus

State = Literal["queued", "preparing", "running", "succeeded", "failed", "stopped", "lost"]
QUEUED: State = "queued"
PREPARING: State = "preparing"
RUNNING: State = "running"
SUCCEEDED: State = "succeeded"
FAILED: State = "failed"
STOPPED: State = "stopped"
LOST: State = "lost"
ENDINGS = SUCCEEDED, FAILED, STOPPED
FINAL = (*ENDINGS, LOST)
TOOL_FAILED = 125
"""The code of a job that never started, or whose end is not known."""


class Missing(NamedTuple):
    """A file or module that a job's last log lines report as missing and that did not exist."""

    name: str
    """A file: relative to the project if it is below it, else as in the log. A module: with dots."""
    kind: Literal["file", "module"] = "file"


class AttemptReport(NamedTuple):
    """A summary of an attempt that has ended."""

    attempt: int
    state: State = FAILED
    code: Optional[int] = None
    reason: str = ""
    first_failing_rank: Optional[int] = None
    signal: Optional[int] = None
    started_at: Optional[str] = None
    """None if its command was never started."""
    ended_at: Optional[str] = None
    resumed_from: Optional[int] = None
    step: Optional[int] = None
    error: str = ""
    """The text by which a repeated failure is recognised."""
    first_failing_group: str = ""
    causes: Tuple[str, ...] = ()
    """The host's state at its failure, if it explains the failure."""


class StalledRank(NamedTuple):
    """What a rank was doing when its attempt was found to have stalled."""

    rank: int
    pid: int = 0
    running: bool = False
    last_line: str = ""
    group: str = ""


class GroupStatus(NamedTuple):
    """A role's started processes on one node (`plan.Group`)."""

    folder: str = ""
    nproc: int = 1
    main: Optional[Process] = None
    """torchrun, or the only rank's wrapper; None before its start."""
    argv: Tuple[str, ...] = ()
    cwd: str = ""
    slots: Dict[str, str] = {}

    @property
    def name(self) -> GroupName:
        return GroupName.parse(self.folder) or ALONE

    def is_ready(self, begun: int) -> bool:
        """Whether the group counts as running once this many of its processes have started. All must have started:
        plan.Role has no other kind of readiness."""
        return begun >= self.nproc


class Status(NamedTuple):
    state: State
    job: str = ""
    """The job's ID; empty in files of the first Torchferry."""
    supervisor: Optional[Identity] = None
    groups: Tuple[GroupStatus, ...] = ()
    """In the plan's order."""
    attempt: int = 0
    """0 for a job that never had a supervisor."""
    first_attempt: int = 0
    """The first attempt of this launch or resume."""
    max_attempts: int = 0
    attempts: Tuple[AttemptReport, ...] = ()
    """The attempts that have ended."""
    began_mono_s: Optional[float] = None
    started_at: Optional[str] = None
    ended_at: Optional[str] = None
    resumed_from: Optional[int] = None
    phase: Optional[str] = None
    """The stage of a running stop: see supervisor/stop_stages.py."""
    grace_s: Optional[float] = None
    queue: Optional[QueueView] = None
    after: Tuple[str, ...] = ()
    """IDs of the jobs that it waits for; if it ended because of them, those for which it never started."""
    devices: Tuple[str, ...] = ()
    """The GPUs that the job has claimed."""
    stalled: Tuple[StalledRank, ...] = ()
    warnings: Tuple[str, ...] = ()
    # how it ended
    code: Optional[int] = None
    reason: str = ""
    first_failing_rank: Optional[int] = None
    first_failing_group: str = ""
    """Its folder; empty for a job's only one."""
    signal: Optional[int] = None
    hint: str = ""
    causes: Tuple[str, ...] = ()
    """The host's state at the failure of its last attempt, if it explains the failure."""
    missing: Tuple[Missing, ...] = ()
    """What its last log lines report as missing."""
    log: Optional[str] = None
    """The log with most information about a failure, as a LogName; empty if all are empty, None if this was not
    checked."""
    swept: Optional[int] = None
    """How many leftover processes were ended; None before this was checked."""
    ended: Optional[int] = None
    """How many processes a stop has ended."""
    remaining: Tuple[Survivor, ...] = ()
    gpus_free: Optional[bool] = None
    gpu_holders: Tuple[GpuHolder, ...] = ()
    # what `judge` adds; not stored in a file
    on_host: str = ""
    """The machine that the job belongs to, if it is not this one."""
    unsupervised: bool = False
    """The supervisor is gone and the ranks run on."""
    damaged: str = ""
    """Why the written status is not used."""


_JUDGED = ("on_host", "unsupervised", "damaged")
_WHOLE = ("attempts", "remaining", "gpu_holders")
"""Keys that an earlier Torchferry expects in every status."""


def status_to_json(status: Status, *, sparse: bool = False) -> Dict[str, Any]:
    """The status as in status.json: the fields of a job's only group are at the top level."""
    value: Dict[str, Any] = to_json(status, sparse=sparse)
    for name in _WHOLE:
        if name in value:
            value[name] = to_json(getattr(status, name))
    if len(status.groups) == 1 and not status.groups[0].folder:
        value.pop("groups")
        value.update({name: to_json(field) for name, field in status.groups[0]._asdict().items() if name != "folder"})
    else:
        value["groups"] = to_json(status.groups)
    return value


def status_from_json(value: Any) -> Status:
    """Raises InvalidData if the value is not a status."""
    status = from_json(value, Status)
    return status if value.get("groups") is not None else status._replace(groups=(from_json(value, GroupStatus),))


class StoredStatus(NamedTuple):
    """A job's stored status; None, with the reason, if it cannot be used."""

    status: Optional[Status]
    damage: str = ""


FOLDER_GONE = "its folder is gone"


def read_stored_status(job: Job) -> StoredStatus:
    """The last written status; without one (missing, damaged, or of another job) None and the reason. Validates all
    types."""
    if not os.path.isdir(job.path):
        return StoredStatus(None, FOLDER_GONE)
    try:
        status = status_from_json(load_json(read_whole(job.status, MAX_BYTES + 1)))
    except FileNotFoundError:
        return StoredStatus(None, "its status.json is missing")
    except OSError as error:
        return StoredStatus(None, "its status.json is damaged: %s" % error.strerror)
    except InvalidData as damage:
        return StoredStatus(None, "its status.json is damaged: %s" % damage)
    if status.supervisor is None:
        return StoredStatus(None, "its status.json is damaged: it names no supervisor")
    whose = status.job or os.path.basename(slot_of(status, "job")) or job.id
    if whose != job.id:
        return StoredStatus(None, "its status.json is of another job, %s" % whose[:80])
    if not status.attempt or not status.first_attempt:  # whoever wrote a status had begun one
        status = status._replace(attempt=status.attempt or 1, first_attempt=status.first_attempt or 1)
    return StoredStatus(status)


def read_status(job: Job) -> Optional[Status]:
    """The last written status, unchecked; None before the supervisor's start. See `judge` for the true state."""
    return read_stored_status(job).status


def write_status(job: Job, status: Status) -> None:
    plain = status._replace(**{name: Status._field_defaults[name] for name in _JUDGED})
    write_json(job.status, status_to_json(plain, sparse=True))


def with_group(status: Status, folder: str, **changes: Any) -> Status:
    """The status with changed fields of a group; adds the group at the end if it does not exist."""
    groups = {group.folder: group for group in status.groups}
    groups[folder] = groups.get(folder, GroupStatus(folder))._replace(**changes)
    return status._replace(groups=tuple(groups.values()))


def slot_of(status: Status, name: str) -> str:
    """The value of a slot; empty before the start."""
    return next((group.slots[name] for group in status.groups if name in group.slots), "")


def visible_gpus(status: Status) -> str:
    """CUDA_VISIBLE_DEVICES of all groups together; empty before the start."""
    return ",".join(group.slots["gpus"] for group in status.groups if group.slots.get("gpus"))


def nproc_of(status: Status) -> int:
    return max(1, sum(group.nproc for group in status.groups))


def main_processes(status: Status) -> Tuple[Process, ...]:
    """The processes that the supervisor has started: torchrun, or a rank's wrapper, of each group; empty before their
    start."""
    return tuple(group.main for group in status.groups if group.main is not None)


def former_attempt(status: Status) -> Optional[AttemptReport]:
    """The attempt before this one; None if this is the first since launch or resume."""
    if status.attempt <= max(status.first_attempt, 1):
        return None
    return next((a for a in status.attempts if a.attempt == status.attempt - 1), None)


def utc(time_s: float) -> str:
    """A Unix time in the format of the records."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time_s))


def gpus_of(plan: Optional[Plan], status: Status) -> Tuple[str, ...]:
    """The job's GPUs as this host chose them, else as the user requested them."""
    chosen, wanted = visible_gpus(status), wanted_gpus(plan) if plan else None
    return tuple(chosen.split(",")) if chosen else wanted.gpus if wanted else ()
