"""A job's status as it was written: the supervisor's status.json, taken at its word.

States: queued, preparing, running, succeeded, failed, stopped, lost; beside `running`, `unsupervised` is true when the
supervisor is gone and the ranks go on. What is true is for `judge` to say.
Stdlib only, Python 3.8, Linux.
"""

import os
import time
from typing import Any, Dict, List, NamedTuple, Optional

from ..host.files import read_json, write_json
from ..host.layout import Job
from ..host.machine import Identity
from ..host.processes import Process
from .plan import Plan, wanted_gpus

QUEUED, PREPARING, RUNNING, LOST = "queued", "preparing", "running", "lost"
ENDINGS = SUCCEEDED, FAILED, STOPPED = "succeeded", "failed", "stopped"
FINAL = (*ENDINGS, LOST)
TOOL_FAILED = 125
"""The code of a job that never started, or whose end nobody knows."""


def read_status(job: Job) -> Optional[Dict[str, Any]]:
    """What the supervisor wrote last, taken at its word; None before its start. See `judge` for the truth."""
    return read_json(job.status)


class Word(NamedTuple):
    """A job's status as it can be used: None with the reason why not."""

    status: Optional[Dict[str, Any]]
    damage: str = ""


def read_word(job: Job) -> Word:
    """The status, if it is one and this job's; nobody else needs to look at its types."""
    if not os.path.isdir(job.path):
        return Word(None, FOLDER_GONE)
    status = read_json(job.status)
    if status is None:
        exists = os.path.lexists(job.status)
        return Word(None, "its status.json is %s" % ("damaged" if exists else "missing"))
    wrong = _wrong(status)
    if wrong:
        return Word(None, "its status.json is damaged: %s" % wrong)
    slots = status.get("slots") or {}
    whose = status.get("job") or os.path.basename(str(slots.get("job") or job.id))
    return Word(status) if whose == job.id else Word(None, "its status.json is of another job, %s" % whose[:80])


FOLDER_GONE = "its folder is gone"
_STATES = (QUEUED, PREPARING, RUNNING, *FINAL)
_IDENTITY = {"machine_id": str, "boot_id": str, "pid": int, "start_time": int, "hostname": str}
_TYPES: Dict[str, Any] = {
    **dict.fromkeys(("job", "reason", "phase", "started_at", "ended_at", "hint"), str),
    **dict.fromkeys(("attempt", "first_attempt", "max_attempts", "nproc", "code", "swept", "ended"), int),
    **dict.fromkeys(("supervisor", "main", "slots", "queue"), dict),
    **dict.fromkeys(("attempts", "warnings", "devices", "remaining", "gpu_holders"), list),
    "began_mono_s": (int, float),
}


def _wrong(status: Dict[str, Any]) -> str:
    """Which of its values cannot be; empty when none is."""
    typed = [(status, key, kind) for key, kind in _TYPES.items()]
    if not any(_is_wrong(*place) for place in typed):
        typed += [(status.get("supervisor") or {}, key, kind) for key, kind in _IDENTITY.items()]
        typed += [(status.get("main") or {}, key, int) for key in ("pid", "start_time")]
        attempts = [a if isinstance(a, dict) else {"attempt": a} for a in status.get("attempts") or []]
        typed += [(attempt, key, int) for attempt in attempts for key in ("attempt", "code")]
    if status.get("state") not in _STATES:
        return "state is %.60r" % (status.get("state"),)
    if not status.get("supervisor"):
        return "it names no supervisor"
    return next(("%s is %.60r" % (key, values[key]) for values, key, kind in typed if _is_wrong(values, key, kind)), "")


def _is_wrong(values: Dict[str, Any], key: str, kind: Any) -> bool:
    value = values.get(key)
    return value is not None and (not isinstance(value, kind) or (kind is int and not 0 <= value < 1 << 53))


def write_status(job: Job, status: Dict[str, Any]) -> None:
    if os.path.isdir(job.status) and not os.path.islink(job.status):  # no file can take a folder's place
        os.rename(job.status, "%s.%d.aside" % (job.status, time.time_ns()))
    write_json(job.status, status)


def gpus_of(plan: Optional[Plan], status: Dict[str, Any]) -> List[str]:
    """The job's GPUs as this host chose them, else as they were asked for."""
    slots = status.get("slots")
    chosen = slots.get("gpus") if isinstance(slots, dict) else None
    wanted = wanted_gpus(plan) if plan else None
    return str(chosen).split(",") if chosen else list(wanted.gpus) if wanted else []


def supervisor_of(status: Dict[str, Any]) -> Optional[Identity]:
    try:
        return Identity(**status["supervisor"])
    except (KeyError, TypeError):
        return None


def former_attempt(status: Dict[str, Any]) -> Optional[Dict[str, Any]]:
    """What the status keeps of the attempt before this one; None when this is the first since launch or resume."""
    number = int(status.get("attempt") or 1)
    if number <= int(status.get("first_attempt") or 1):
        return None
    return next((a for a in status.get("attempts") or [] if a.get("attempt") == number - 1), None)


def main_process(status: Dict[str, Any]) -> Optional[Process]:
    """torchrun, or the only rank's wrapper; None before its start."""
    main = status.get("main")
    return Process(int(main["pid"]), int(main["start_time"])) if isinstance(main, dict) else None


def utc(time_s: float) -> str:
    """A Unix time as it stands in the records."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time_s))
