"""A job's status: what its supervisor knows of it, as status.json holds it and as every command sees it.

States: queued, preparing, running, succeeded, failed, stopped, lost. What is true is for `judge` to say.
Stdlib only, Python 3.8: both ends use it.
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
"""The code of a job that never started, or whose end nobody knows."""


class Missing(NamedTuple):
    """What a job's last words call missing, and was not there."""

    name: str
    """Of a file: relative to the project where it lies below it, else as the job said it. Of a module: with dots."""
    kind: Literal["file", "module"] = "file"


class AttemptReport(NamedTuple):
    """What the status keeps of an attempt that has ended."""

    attempt: int
    state: State = FAILED
    code: Optional[int] = None
    reason: str = ""
    first_failing_rank: Optional[int] = None
    signal: Optional[int] = None
    started_at: Optional[str] = None
    """None for one whose command was never started."""
    ended_at: Optional[str] = None
    resumed_from: Optional[int] = None
    step: Optional[int] = None
    error: str = ""
    """The words by which a failure is known again."""
    first_failing_group: str = ""
    causes: Tuple[str, ...] = ()
    """What this host was like at its death, as far as it tells why."""


class StalledRank(NamedTuple):
    """What a rank did when its attempt was found to have stalled."""

    rank: int
    pid: int = 0
    running: bool = False
    last_line: str = ""
    group: str = ""


class GroupStatus(NamedTuple):
    """A role's processes on one node (`plan.Group`), as they were started."""

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
        """Whether it counts as running once so many of its processes have begun. All must have: that is the only
        readiness that a role can ask for (plan.Role)."""
        return begun >= self.nproc


class Status(NamedTuple):
    state: State
    job: str = ""
    """The id; the first Torchferry did not say it."""
    supervisor: Optional[Identity] = None
    groups: Tuple[GroupStatus, ...] = ()
    """In the plan's order."""
    attempt: int = 0
    """0 for a job that never had a supervisor."""
    first_attempt: int = 0
    """Of this launch or resume."""
    max_attempts: int = 0
    attempts: Tuple[AttemptReport, ...] = ()
    """Those that have ended."""
    began_mono_s: Optional[float] = None
    started_at: Optional[str] = None
    ended_at: Optional[str] = None
    resumed_from: Optional[int] = None
    phase: Optional[str] = None
    """Of a stop under way: see supervisor/stop_stages.py."""
    grace_s: Optional[float] = None
    queue: Optional[QueueView] = None
    after: Tuple[str, ...] = ()
    """Ids of the jobs that it waits for; of one that ended because of them, those for which it never started."""
    devices: Tuple[str, ...] = ()
    """The GPUs that are claimed for it."""
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
    """What the host was like at the death of its last attempt, as far as it tells why."""
    missing: Tuple[Missing, ...] = ()
    """What its last words call missing."""
    log: Optional[str] = None
    """By LogName, the log that tells most of a failure; empty where none has a byte, None where nobody has looked."""
    swept: Optional[int] = None
    """How many processes it left running that were ended; None until somebody has looked."""
    ended: Optional[int] = None
    """Of a stop: how many processes it has ended."""
    remaining: Tuple[Survivor, ...] = ()
    gpus_free: Optional[bool] = None
    gpu_holders: Tuple[GpuHolder, ...] = ()
    # what `judge` adds; in no file
    on_host: str = ""
    """The machine whose job it is, when it is not this one's."""
    unsupervised: bool = False
    """The supervisor is gone and the ranks go on."""
    damaged: str = ""
    """Why the written status is not believed."""


_JUDGED = ("on_host", "unsupervised", "damaged")
_WHOLE = ("attempts", "remaining", "gpu_holders")
"""An earlier Torchferry takes every key of these for granted."""


def status_to_json(status: Status, *, sparse: bool = False) -> Dict[str, Any]:
    """As it stands in status.json: the fields of a job's only group are its own there."""
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
    """A job's status as it can be used: None with the reason why not."""

    status: Optional[Status]
    damage: str = ""


FOLDER_GONE = "its folder is gone"


def read_stored_status(job: Job) -> StoredStatus:
    """What the supervisor wrote last, if it is a status and this job's; nobody else needs to look at its types."""
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
    """What the supervisor wrote last, taken at its word; None before its start. See `judge` for the truth."""
    return read_stored_status(job).status


def write_status(job: Job, status: Status) -> None:
    plain = status._replace(**{name: Status._field_defaults[name] for name in _JUDGED})
    write_json(job.status, status_to_json(plain, sparse=True))


def with_group(status: Status, folder: str, **changes: Any) -> Status:
    """The status with a group's fields changed; a group that it does not have begins with them, as the last one."""
    groups = {group.folder: group for group in status.groups}
    groups[folder] = groups.get(folder, GroupStatus(folder))._replace(**changes)
    return status._replace(groups=tuple(groups.values()))


def slot_of(status: Status, name: str) -> str:
    """What a slot was filled with; empty before."""
    return next((group.slots[name] for group in status.groups if name in group.slots), "")


def visible_gpus(status: Status) -> str:
    """CUDA_VISIBLE_DEVICES of all groups together; empty before."""
    return ",".join(group.slots["gpus"] for group in status.groups if group.slots.get("gpus"))


def nproc_of(status: Status) -> int:
    """How many ranks the job has."""
    return max(1, sum(group.nproc for group in status.groups))


def main_processes(status: Status) -> Tuple[Process, ...]:
    """What the supervisor has started: torchrun, or a rank's wrapper, of each group; none before their start."""
    return tuple(group.main for group in status.groups if group.main is not None)


def former_attempt(status: Status) -> Optional[AttemptReport]:
    """The attempt before this one; None when this is the first since launch or resume."""
    if status.attempt <= max(status.first_attempt, 1):
        return None
    return next((a for a in status.attempts if a.attempt == status.attempt - 1), None)


def utc(time_s: float) -> str:
    """A Unix time as it stands in the records."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time_s))


def gpus_of(plan: Optional[Plan], status: Status) -> Tuple[str, ...]:
    """The job's GPUs as this host chose them, else as they were asked for."""
    chosen, wanted = visible_gpus(status), wanted_gpus(plan) if plan else None
    return tuple(chosen.split(",")) if chosen else wanted.gpus if wanted else ()
