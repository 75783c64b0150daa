"""The jobs on this host: found, listed, looked at. One whose supervisor was killed gets a new one from whoever
connects next, and what an ended one left over is ended.

Stdlib only, Python 3.8: this package runs on the host.
"""

import os
import time
from typing import Any, Dict, List, Optional, Sequence

from ..host.errors import AgentError
from ..host.killing import SWEEP_S, end_all
from ..host.layout import Job, Root, matching_ids, name_ids
from ..host.locks import locked
from ..host.machine import boot_id, this_machine
from ..host.marks import Look, job_processes
from ..host.processes import Process, describe, still_there
from ..host.typed import to_json
from ..job import progress
from ..job.groups import processes_of
from ..job.judge import judge
from ..job.plan import main_role
from ..job.record import Record, known_plan, known_record
from ..job.status import FINAL, LOST, TOOL_FAILED, gpus_of, supervisor_of, write_status
from ..supervisor import start
from ..wire.conversation import Call

GONE_S = 10.0
"""A supervisor that has written its last word may take so long to be gone."""


def find_job(root: Root, job_id: str) -> Job:
    """The job of that id, or of the only id that begins with it, else ends with it; also one that has lost its folder,
    as long as it runs."""
    job_id = job_id.lower()
    try:
        job = root.job(job_id)
    except ValueError:
        raise AgentError("unknown_job", "%r is not a job id" % job_id)
    if os.path.isdir(job.path):
        return job
    look = Look()
    if look.of(job).all:
        return job
    ids = [j.id for j in sorted(root.all_jobs(), key=_written_at, reverse=True)]
    found = matching_ids(job_id, dict.fromkeys([*ids, *look.job_ids(root)]))
    if len(found) > 1:
        raise AgentError(
            "unknown_job", "%s matches %s" % (job_id, name_ids(found)), "give more of the id, or how it ends"
        )
    if not found:
        raise AgentError("unknown_job", "no job %s on this host" % job_id, "list them: deploy.py ps")
    return root.job(found[0])


def find_folder(root: Root, job_id: str, *, kind: str = "host") -> Job:
    """The job, for whoever wants its files. AgentError of that kind when its folder is gone."""
    job = find_job(root, job_id)
    if not os.path.isdir(job.path):
        raise AgentError(
            kind,
            "the folder of %s is gone, with its logs and results: %s" % (job.id, job.path),
            "what still runs of it: deploy.py stop " + job.id,
        )
    return job


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
    groups = to_json(processes_of(job, int(now.get("nproc") or 1)))
    call.send_event("status", dict(now, job_id=job.id, path=job.path, groups=groups, **found))
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
    "damaged",
    "started_at",
    "ended_at",
)


def list_jobs(root: Root) -> List[Dict[str, Any]]:
    """One summary per job of this root, newest first. A broken job folder is listed as lost, never an error; a job that
    has lost its folder is listed as long as it runs."""
    look = Look()
    jobs = {job.id: job for job in [*map(root.job, look.job_ids(root)), *root.all_jobs()]}
    return sorted((_summary(job, look) for job in jobs.values()), key=lambda s: (s["created"], s["id"]), reverse=True)


def _summary(job: Job, look: Look) -> Dict[str, Any]:
    try:
        status = judge(job, look)
    except OSError as e:
        status = {"state": LOST, "code": TOOL_FAILED, "reason": "the job folder is broken: %s" % e}
    record, plan = known_record(job), known_plan(job)
    supervisor = status.get("supervisor")
    return {
        **{key: status.get(key) for key in _SHOWN},
        "id": job.id,
        "unsupervised": bool(status.get("unsupervised")),
        "name": plan.name if plan else "",
        "kind": main_role(plan).name if plan else None,
        "created": plan.created if plan else "",
        "age_s": _age_s(record),
        "gpus": gpus_of(plan, status),
        "nproc": main_role(plan).nproc if plan else None,
        "host": supervisor.get("hostname") if isinstance(supervisor, dict) else None,
        "step": progress.last_step(job),
    }


def _age_s(record: Optional[Record]) -> Optional[float]:
    """Seconds since the job was made, by this host's clock; the client's may differ."""
    return max(0.0, time.time() - record.created_at) if record and record.created_at is not None else None


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
                adopt(job, status)
            elif _is_unswept(status):
                sweep_ended(job)
        except (AgentError, OSError, KeyError, TypeError, ValueError):
            continue  # a job that is broken must not keep the others waiting


def adopt(job: Job, status: Dict[str, Any]) -> None:
    """Gives the job a new supervisor, which watches what still runs; nothing when another agent was first."""
    try:
        start.adopt(job, attempt=int(status.get("attempt") or 1))
    except AgentError:
        if judge(job).get("unsupervised"):
            raise


def sweep_ended(job: Job) -> Dict[str, Any]:
    """Ends what an ended job left running; its status as it is then. Nothing when it was started again meanwhile."""
    if not os.path.isdir(job.path):
        return judge(job)  # lost, and nothing of it runs
    with locked(job):
        status = judge(job)
        if status["state"] not in FINAL:
            return status
        told, left = end_all(lambda: job_processes(job), term_s=SWEEP_S, settle_s=0)
        final = {**with_remaining(status, left), "ended": len(told - set(left))}
        final["swept"] = int(status.get("swept") or 0) + len(told)
        kept = {**status, "swept": final["swept"], "remaining": final["remaining"]}
        if kept != status and not status.get("damaged") and supervisor_of(status) is not None:
            write_status(job, kept)
        return final


def with_remaining(status: Dict[str, Any], left: Sequence[Process]) -> Dict[str, Any]:
    """An ended job's status with what is `remaining` of it now: `left`, and what could not be ended before."""
    remaining = [*left, *(process for process in still_there(status.get("remaining")) if process not in left)]
    return {**status, "remaining": [describe(process) for process in remaining]}


def _is_unswept(status: Dict[str, Any]) -> bool:
    """Whether the job ended on this machine without a supervisor, which would have ended what it left running."""
    identity = supervisor_of(status)
    here = identity is not None and (identity.machine_id, identity.boot_id) == (this_machine(), boot_id())
    return here and status.get("state") in FINAL and "swept" not in status
