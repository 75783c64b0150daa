"""A job's records as they were written: the supervisor's status.json and the plan in job.json, taken at their word.

States: queued, preparing, running, succeeded, failed, stopped, lost; beside `running`, `unsupervised` is true when the
supervisor is gone and the ranks go on. What is true is for `judge` to say.
Stdlib only, Python 3.8, Linux.
"""

import os
import time
from typing import Any, Dict, List, Optional

from ..host.files import read_json, remove, write_json
from ..host.layout import Job
from ..host.machine import Identity
from ..host.processes import Process

QUEUED, PREPARING, RUNNING, LOST = "queued", "preparing", "running", "lost"
ENDINGS = SUCCEEDED, FAILED, STOPPED = "succeeded", "failed", "stopped"
FINAL = (*ENDINGS, LOST)
TOOL_FAILED = 125
"""The code of a job that never started, or whose end nobody knows."""


def read_status(job: Job) -> Optional[Dict[str, Any]]:
    """What the supervisor wrote last, taken at its word; None before its start. See `judge` for the truth."""
    return read_json(job.status)


def write_status(job: Job, status: Dict[str, Any]) -> None:
    write_json(job.status, status)


def read_plan(job: Job) -> Dict[str, Any]:
    """The plan from job.json, empty when there is none."""
    plan = (read_json(job.record) or {}).get("plan")
    return plan if isinstance(plan, dict) else {}


def gpus_of(plan: Dict[str, Any], status: Dict[str, Any]) -> List[str]:
    """The job's GPUs as this host chose them, else as they were asked for."""
    slots = status.get("slots")
    chosen = slots.get("gpus") if isinstance(slots, dict) else None
    asked = plan.get("gpus")
    return str(chosen).split(",") if chosen else list(asked) if isinstance(asked, list) else []


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


# --- kept by the supervisor -------------------------------------------------------------------------------------------

RESERVE_BYTES = 64 << 10
"""Held on the disk for the final status: the job's own output may have filled it."""
LAST_TRIES = 60
"""One a second, when even then there is no room for the final status."""


class StatusFile:
    """The job's status as its supervisor keeps it: written again when a full disk refused it, with room held for the
    last word. `values` is what it says, `unsaved` whether the file lags behind."""

    def __init__(self, job: Job, values: Dict[str, Any]) -> None:
        self.values = values
        self.unsaved = False
        self._job = job

    def save(self, **changes: Any) -> None:
        """A full disk must not end the job: `retry` and `save_last` try again."""
        self.values.update(changes)
        try:
            write_status(self._job, self.values)
        except OSError as e:
            if not self.unsaved:
                say("cannot write %s: %s" % (self._job.status, e.strerror))
            self.unsaved = True
        else:
            self.unsaved = False

    def retry(self) -> None:
        """Writes what could not be written before."""
        if self.unsaved:
            self.save()

    def reserve(self) -> None:
        """Keeps room on the disk for the last word."""
        try:
            with open(self._job.reserve, "wb") as f:
                f.write(os.urandom(RESERVE_BYTES))
        except OSError:
            pass  # then the final status waits for room

    def save_last(self, **final: Any) -> None:
        """The last word, in the room that was kept for it."""
        remove(self._job.reserve)
        self.save(**final)
        for _ in range(LAST_TRIES):
            if not self.unsaved:
                return
            time.sleep(1)
            self.save()


def say(text: str) -> None:
    """Into the supervisor's log; a full disk must not end the supervisor."""
    try:
        os.write(2, (text + "\n").encode("utf-8", "replace"))
    except OSError:
        pass
