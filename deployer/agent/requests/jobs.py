"""The jobs on this host: listed, looked at, stopped. One whose supervisor was killed gets a new one from whoever
connects next, and what an ended one left over is ended.

Stdlib only, Python 3.8: this package runs on the host.
"""

import os
import signal
import time
from typing import Any, Dict, List, Optional

from ..host.errors import AgentError
from ..host.files import read_json
from ..host.layout import Job, Root, matching_ids, name_ids
from ..host.locks import locked
from ..host.machine import boot_id, this_machine
from ..host.processes import SWEEP_S, Process, describe, end_all, job_processes, send
from ..job import progress
from ..job.judge import judge
from ..job.status import FINAL, LOST, TOOL_FAILED, gpus_of, supervisor_of, write_status
from ..job.stop import request_stop
from ..supervisor import start
from ..wire.conversation import Call


def find_job(root: Root, job_id: str) -> Job:
    """The job of that id, or of the only id that begins with it, else ends with it."""
    job_id = job_id.lower()
    try:
        job = root.job(job_id)
    except ValueError:
        raise AgentError("unknown_job", "%r is not a job id" % job_id)
    if os.path.isdir(job.path):
        return job
    found = matching_ids(job_id, [j.id for j in sorted(root.all_jobs(), key=_written_at, reverse=True)])
    if len(found) > 1:
        raise AgentError(
            "unknown_job", "%s matches %s" % (job_id, name_ids(found)), "give more of the id, or how it ends"
        )
    if not found:
        raise AgentError("unknown_job", "no job %s on this host" % job_id, "list them: deploy.py ps")
    return root.job(found[0])


def _written_at(job: Job) -> float:
    """Seconds since 1970 when the job was launched, or resumed last."""
    try:
        return os.path.getmtime(job.record)
    except OSError:
        return 0.0


def ps(root: Root, call: Call) -> Dict[str, Any]:
    call.send_event("jobs", list_jobs(root))
    return {}


def status(root: Root, call: Call) -> Dict[str, Any]:
    job = find_job(root, call.head["job"])
    now = judge(job)
    found = {"latest": progress.last_metrics(job), "silent_s": progress.silent_s(job, int(now.get("attempt") or 1))}
    call.send_event("status", dict(now, job_id=job.id, path=job.path, **found))
    return {}


# --- in short, as ps shows them ---------------------------------------------------------------------------------------

_SHOWN = (
    "state",
    "code",
    "reason",
    "on_host",
    "attempt",
    "max_attempts",
    "queue",
    "started_at",
    "ended_at",
)


def list_jobs(root: Root) -> List[Dict[str, Any]]:
    """One summary per job of this root, newest first. A broken job folder is listed as lost, never an error."""
    return sorted((_summary(job) for job in root.all_jobs()), key=lambda s: (s["created"], s["id"]), reverse=True)


def _summary(job: Job) -> Dict[str, Any]:
    try:
        status = judge(job)
    except OSError as e:
        status = {"state": LOST, "code": TOOL_FAILED, "reason": "the job folder is broken: %s" % e}
    record = read_json(job.record) or {}
    plan = record.get("plan")
    plan = plan if isinstance(plan, dict) else {}
    supervisor = status.get("supervisor")
    return {
        **{key: status.get(key) for key in _SHOWN},
        "id": job.id,
        "unsupervised": bool(status.get("unsupervised")),
        "name": str(plan.get("name", "")),
        "kind": plan.get("kind"),
        "created": str(plan.get("created", "")),
        "age_s": _age_s(record),
        "gpus": gpus_of(plan, status),
        "nproc": plan.get("nproc"),
        "host": supervisor.get("hostname") if isinstance(supervisor, dict) else None,
        "step": progress.last_step(job),
    }


def _age_s(record: Dict[str, Any]) -> Optional[float]:
    """Seconds since the job was made, by this host's clock; the client's may differ."""
    created = record.get("created_at")
    return max(0.0, time.time() - created) if isinstance(created, (int, float)) else None


# --- stop ------------------------------------------------------------------------------------------------------------


def stop(root: Root, call: Call) -> Dict[str, Any]:
    """Asks the supervisor to stop the job and reports how it goes until the job has ended. Idempotent. Of a job that
    has ended already, what it left running is ended."""
    job = find_job(root, call.head["job"])
    before = judge(job)
    _check_here(job, before)
    if before["state"] in FINAL:
        final = before if before.get("on_host") else sweep_ended(job)
    else:
        request_stop(job, float(call.head.get("grace_s", 120.0)), force=bool(call.head.get("force")))
        final = _await_end(job, call)
    call.send_event("status", dict(final, job_id=job.id, was=before["state"]))
    return {}


def _check_here(job: Job, status: Dict[str, Any]) -> None:
    if status.get("on_host") and status["state"] not in FINAL:
        raise AgentError(
            "host",
            "job %s runs on host %s, and this is host %s" % (job.id, status["on_host"], os.uname().nodename),
            "connect to that host: deploy.py stop %s --ssh %s" % (job.id, status["on_host"]),
        )


def _await_end(job: Job, call: Call) -> Dict[str, Any]:
    supervisor = supervisor_of(judge(job))
    if supervisor is not None:
        send(Process(supervisor.pid, supervisor.start_time), signal.SIGCONT)  # a halted one would stop nothing
    shown = ""
    while True:
        now = judge(job)
        if now.get("unsupervised"):
            adopt(job)
        phase = str(now.get("phase") or now["state"])
        if phase != shown:
            shown = phase
            call.send_event("state", now)
        if now["state"] in FINAL or call.cancelled.wait(0.1):
            return now


# --- without a supervisor ---------------------------------------------------------------------------------------------


def adopt_all(root: Root, *, within_s: float) -> None:
    """Adopts every job of this root and machine that runs unsupervised, and sweeps those that ended so."""
    deadline = time.monotonic() + within_s
    for job in root.all_jobs():
        if time.monotonic() > deadline:
            return
        try:
            status = judge(job)
            if status.get("unsupervised"):
                adopt(job)
            elif _is_unswept(status):
                sweep_ended(job)
        except (AgentError, OSError, KeyError, TypeError, ValueError):
            continue  # a job that is broken must not keep the others waiting


def adopt(job: Job) -> None:
    """Gives the job a new supervisor, which watches what still runs; nothing when another agent was first."""
    try:
        start.adopt(job)
    except AgentError:
        if judge(job).get("unsupervised"):
            raise


def sweep_ended(job: Job) -> Dict[str, Any]:
    """Ends what an ended job left running; its status as it is then. Nothing when it was started again meanwhile."""
    with locked(job):
        status = judge(job)
        if status["state"] not in FINAL:
            return status
        told, remaining = end_all(lambda: job_processes(job), term_s=SWEEP_S, settle_s=0)
        swept = {"swept": int(status.get("swept") or 0) + len(told), "remaining": [describe(p) for p in remaining]}
        final = {**status, **swept}
        if final != status and supervisor_of(status) is not None:
            write_status(job, final)
        return {**final, "ended": len(told) - len(remaining)}


def _is_unswept(status: Dict[str, Any]) -> bool:
    """Whether the job ended on this machine without a supervisor, which would have ended what it left running."""
    identity = supervisor_of(status)
    here = identity is not None and (identity.machine_id, identity.boot_id) == (this_machine(), boot_id())
    return here and status.get("state") in FINAL and "swept" not in status
