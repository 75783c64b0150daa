"""The truth about a job: what its supervisor wrote, checked against what still runs.

A host judges only jobs of its own machine id: homes may be shared. Stdlib only, Python 3.8, Linux.
"""

import fcntl
import os
import time
from typing import Any, Dict, List

from ..host.files import read_json
from ..host.layout import Job
from ..host.locks import is_held
from ..host.machine import boot_id, is_alive, this_machine
from ..host.processes import Process, is_running, job_processes
from .ending import RankRecord, decide_ending, read_ranks, with_outcome
from .status import (
    FINAL,
    LOST,
    PREPARING,
    QUEUED,
    RUNNING,
    TOOL_FAILED,
    former_attempt,
    main_process,
    read_status,
    supervisor_of,
    utc,
    write_status,
)
from .stop import read_stop

LAUNCH_S = 60.0
"""A job folder without a status may be this old before its launch counts as broken off."""


def judge(job: Job) -> Dict[str, Any]:
    """The job's status as it really is: the written one, with `state`, `code` and `reason` put right.

    `on_host` names the machine when it is another one's job, which is then shown as written. A job whose supervisor is
    gone gets its final status written here, once. One whose status says what cannot be is lost.
    """
    try:
        return _judge(job)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        reason = "its status is damaged: %s" % str(error)[:200]
        return {"state": LOST, "code": TOOL_FAILED, "reason": reason, "damaged": True}


def _judge(job: Job) -> Dict[str, Any]:
    status = read_status(job)
    if status is None:
        return _without_status(job)
    if status.get("state") in FINAL:
        return status
    identity = supervisor_of(status)
    if identity is None:
        return {**status, "state": LOST, "code": TOOL_FAILED, "reason": "status.json names no supervisor"}
    if identity.machine_id != this_machine():
        return {**status, "on_host": identity.hostname}
    if is_alive(identity):
        return status
    latest = read_status(job) or status  # it may have written its last word just before it ended
    return (
        latest
        if latest.get("state") in FINAL or latest.get("supervisor") != status["supervisor"]
        else _orphaned(job, latest)
    )


def _without_status(job: Job) -> Dict[str, Any]:
    try:
        age_s = time.time() - os.stat(job.path).st_mtime
    except OSError:
        return {"state": LOST, "code": TOOL_FAILED, "reason": "the job has no folder"}
    if abs(age_s) < LAUNCH_S or is_held(job.lock, fcntl.LOCK_SH):
        return {"state": PREPARING}
    return {"state": LOST, "code": TOOL_FAILED, "reason": "the launch did not complete"}


def _orphaned(job: Job, status: Dict[str, Any]) -> Dict[str, Any]:
    """The supervisor was killed: do its processes go on, and if not, how did they end?"""
    attempt = int(status.get("attempt", 1))
    rebooted = status["supervisor"]["boot_id"] != boot_id()
    ranks = read_ranks(job, attempt)
    if not rebooted and _any_running(job, status, ranks):
        return {**status, "state": RUNNING, "unsupervised": True}
    final = {**status, **_end_of_orphan(job, status, ranks, rebooted=rebooted), "phase": None, "queue": None}
    try:
        write_status(job, final)
    except OSError:
        pass  # a full or read-only disk: the next one judges the same
    return final


def _any_running(job: Job, status: Dict[str, Any], ranks: List[RankRecord]) -> bool:
    main = main_process(status)
    processes = [Process(r.pid, r.start_time) for r in ranks if r.code is None]
    processes += [Process(r.wrapper_pid, r.wrapper_start_time) for r in ranks]
    if any(is_running(p) for p in processes + ([main] if main else [])):
        return True
    # a supervisor that was killed early may not have noted what it had started
    return main is None and bool(job_processes(job))


def _end_of_orphan(job: Job, status: Dict[str, Any], ranks: List[RankRecord], *, rebooted: bool) -> Dict[str, Any]:
    stop = read_stop(job)
    ending = decide_ending(
        ranks,
        nproc=int(status.get("nproc", 1)),
        launcher_code=None,
        stop_requested_mono=stop.requested_mono if stop else None,
        stop_reason=stop.reason if stop else "",
    )
    ending = with_outcome(ending, read_json(job.outcome))
    if ending is not None:
        ended_at = max((r.ended_at_ns for r in ranks), default=0) / 1e9
        return {**ending._asdict(), "ended_at": utc(ended_at or time.time())}
    former = former_attempt(status)
    if status.get("state") == PREPARING and former is not None:  # between two attempts of one supervisor
        how = "the host was rebooted" if rebooted else "its supervisor was killed"
        reason = "%s; %s before attempt %d" % (former.get("reason"), how, status["attempt"])
        kept = {key: former.get(key) for key in ("state", "code", "first_failing_rank", "signal", "ended_at")}
        return {**kept, "reason": reason}
    if rebooted:
        reason = "the host was rebooted"
    elif status.get("state") == QUEUED:
        reason = "it waited for its GPUs, and its supervisor is gone"
    elif main_process(status) is None:
        reason = "the launch did not complete: its supervisor is gone"
    else:
        reason = "the supervisor and the job's processes are gone and left no exit record"
    return {"state": LOST, "code": TOOL_FAILED, "reason": reason, "ended_at": utc(time.time())}
