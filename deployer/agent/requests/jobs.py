"""What a client may ask about the jobs on this host: list them, look at one, stop one.

Stdlib only, Python 3.8: this package runs on the host.
"""

import os
import signal
from typing import Any, Dict

from ..host.errors import AgentError
from ..host.layout import Job, Root, matching_ids, name_ids
from ..host.processes import Process, send
from ..job import progress, summary
from ..job.judge import judge
from ..job.status import FINAL, supervisor_of
from ..job.stop import request_stop
from ..wire.conversation import Call
from . import adopt


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
    call.send_event("jobs", summary.list_jobs(root))
    return {}


def status(root: Root, call: Call) -> Dict[str, Any]:
    job = find_job(root, call.head["job"])
    now = judge(job)
    found = {"latest": progress.last_metrics(job), "silent_s": progress.silent_s(job, int(now.get("attempt") or 1))}
    call.send_event("status", dict(now, job_id=job.id, path=job.path, **found))
    return {}


# --- stop ------------------------------------------------------------------------------------------------------------


def stop(root: Root, call: Call) -> Dict[str, Any]:
    """Asks the supervisor to stop the job and reports how it goes until the job has ended. Idempotent. Of a job that
    has ended already, what it left running is ended."""
    job = find_job(root, call.head["job"])
    before = judge(job)
    _check_here(job, before)
    if before["state"] in FINAL:
        final = before if before.get("on_host") else adopt.sweep_ended(job)
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
            adopt.adopt(job)
        phase = str(now.get("phase") or now["state"])
        if phase != shown:
            shown = phase
            call.send_event("state", now)
        if now["state"] in FINAL or call.cancelled.wait(0.1):
            return now
