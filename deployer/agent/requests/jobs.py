"""Finds, lists and reads the jobs on this host. A job whose supervisor was killed gets a new one from the next client
that connects, and processes that an ended job left are ended.

Stdlib only, Python 3.8: this package runs on the host.
"""

import calendar
import os
import shlex
import time
from typing import List, Optional, Sequence, Tuple

from ..host.errors import AgentError
from ..host.killing import SWEEP_S, end_all
from ..host.layout import Job, Root, matching_ids, name_ids
from ..host.locks import locked
from ..host.machine import boot_id, this_machine
from ..host.marks import ProcessSnapshot, job_processes
from ..host.processes import Process, describe, still_there
from ..host.typed import InvalidData, to_json
from ..job import progress
from ..job.groups import processes_of
from ..job.judge import judge
from ..job.plan import Plan, main_role, process_count
from ..job.record import plan_of, read_record
from ..job.status import FINAL, LOST, QUEUED, TOOL_FAILED, Status, gpus_of, nproc_of, write_status
from ..job.views import JobView, OfJob, Row
from ..supervisor import start
from ..wire.conversation import Call

MAX_COMMAND = 200
"""Maximum characters of a program's command in a row."""
GONE_S = 10.0
"""Seconds in which a supervisor must end after it has written the final status."""


def find_job(root: Root, job_id: str) -> Job:
    """The job of this ID, or of the only ID that begins with it, else ends with it. Also finds a running job without a
    folder."""
    job_id = job_id.lower()
    try:
        job = root.job(job_id)
    except ValueError:
        raise AgentError("unknown_job", "%r is not a job id" % job_id)
    if os.path.isdir(job.path):
        return job
    snapshot = ProcessSnapshot()
    if snapshot.of(job).all:
        return job
    ids = [j.id for j in sorted(root.all_jobs(), key=_written_at, reverse=True)]
    found = matching_ids(job_id, dict.fromkeys([*ids, *snapshot.job_ids(root)]))
    if len(found) > 1:
        raise AgentError(
            "unknown_job", "%s matches %s" % (job_id, name_ids(found)), "give more of the id, or how it ends"
        )
    if not found:
        raise AgentError("unknown_job", "no job %s on this host" % job_id, "list them: deploy.py ps")
    return root.job(found[0])


def find_folder(root: Root, job_id: str, *, kind: str = "host") -> Job:
    """The job, if its files are needed. Raises AgentError of this kind if its folder is gone."""
    job = find_job(root, job_id)
    if not os.path.isdir(job.path):
        raise AgentError(
            kind,
            "the folder of %s is gone, with its logs and results: %s" % (job.id, job.path),
            "what still runs of it: deploy.py stop " + job.id,
        )
    return job


def _written_at(job: Job) -> float:
    """When the job was launched or last resumed, in seconds since 1970."""
    try:
        return os.path.getmtime(job.record)
    except OSError:
        return 0.0


def ps(root: Root, call: Call) -> None:
    call.send_event("jobs", to_json(list_jobs(root)))


def status(root: Root, call: Call) -> None:
    job = find_job(root, call.read(OfJob).job)
    now = judge(job)
    latest, silent_s = progress.last_metrics(job), progress.silent_s(job, now.attempt)
    view = JobView(job.id, now, job.path, tuple(processes_of(job, nproc_of(now))), latest, silent_s)
    call.send_event("status", to_json(view, sparse=True))


# --- in short, as ps shows them ---------------------------------------------------------------------------------------


def list_jobs(root: Root) -> List[Row]:
    """One row per job of this root, newest first. A broken job folder is listed as lost and never raises. A job without
    a folder is listed while it runs."""
    snapshot = ProcessSnapshot()
    jobs = {job.id: job for job in [*map(root.job, snapshot.job_ids(root)), *root.all_jobs()]}
    return sorted((row_of(job, snapshot) for job in jobs.values()), key=lambda row: (row.created, row.id), reverse=True)


def row_of(job: Job, snapshot: ProcessSnapshot) -> Row:
    try:
        status = judge(job, snapshot)
    except OSError as e:
        status = Status(LOST, code=TOOL_FAILED, reason="the job folder is broken: %s" % e)
    plan, age_s, now_s, damage = _known(job)
    recent = progress.recent(job)
    return Row(
        job.id,
        status.state,
        code=status.code,
        reason=status.reason,
        on_host=status.on_host,
        attempt=status.attempt,
        max_attempts=status.max_attempts,
        queue=status.queue,
        after=status.after,
        damaged=status.damaged or damage,
        started_at=status.started_at,
        ended_at=status.ended_at,
        unsupervised=status.unsupervised,
        name=plan.name if plan else "",
        kind=main_role(plan).name if plan else None,
        created=plan.created if plan else "",
        age_s=age_s,
        gpus=gpus_of(plan, status),
        nproc=process_count(plan) if plan else None,
        host=status.supervisor.hostname if status.supervisor is not None else None,
        step=recent.step,
        steps=recent.steps,
        loss=recent.loss,
        step_s=recent.step_s,
        command=_command_of(plan),
        ran_s=_ran_s(status, now_s),
    )


def _known(job: Job) -> Tuple[Optional[Plan], Optional[float], Optional[float], str]:
    """(the plan, seconds since the job's creation, the current Unix time, why its job.json cannot be read)."""
    if not os.path.lexists(job.record):
        return None, None, None, ""  # of a launch that has only begun
    age_s = now_s = None
    try:
        record = read_record(job)
        if record.created_at is not None:
            now_s = time.time()
            age_s = max(0.0, now_s - record.created_at)
        return plan_of(job, record), age_s, now_s, ""
    except InvalidData as damage:
        return None, age_s, now_s, str(damage)


def _command_of(plan: Optional[Plan]) -> str:
    """The beginning of a program's command; empty for a trainer, which has its name."""
    return " ".join(map(shlex.quote, plan.request.command))[:MAX_COMMAND] if plan else ""


def _ran_s(status: Status, now_s: Optional[float]) -> Optional[float]:
    """Seconds for which the last attempt has run, or ran; None for a lost job, whose end is not known."""
    if status.state == LOST:
        return None
    began_s = _unix_s(status.started_at)
    ended_s = _unix_s(status.ended_at) if status.state in FINAL else now_s
    return max(0.0, ended_s - began_s) if began_s is not None and ended_s is not None else None


def _unix_s(then: Optional[str]) -> Optional[float]:
    """The Unix time of a text in the format of `status.utc`."""
    try:
        return calendar.timegm(time.strptime(then or "", "%Y-%m-%dT%H:%M:%SZ"))
    except ValueError:
        return None


# --- without a supervisor ---------------------------------------------------------------------------------------------


def adopt_all(root: Root, *, within_s: float) -> None:
    """Adopts every unsupervised running job of this root and machine, and sweeps jobs that ended without a
    supervisor."""
    deadline = time.monotonic() + within_s
    for job in root.all_jobs():
        if time.monotonic() > deadline:
            return
        try:
            status = judge(job)
            if status.unsupervised:
                adopt(job, status)
            elif _is_unswept(status):
                sweep_ended(job)
        except (AgentError, OSError):
            continue  # a job that is broken must not keep the others waiting


def adopt(job: Job, status: Status) -> None:
    """Gives the job a new supervisor, which watches its running processes. Does nothing if another agent was first."""
    try:
        if status.state == QUEUED:  # it has yet to begin
            from .after import wait_again

            wait_again(job)
        else:
            start.adopt(job, attempt=status.attempt)
    except AgentError:
        if judge(job).unsupervised:
            raise


def sweep_ended(job: Job) -> Status:
    """Ends the processes that an ended job left. Returns its status after that. Does nothing if the job was started
    again in between."""
    if not os.path.isdir(job.path):
        return judge(job)  # lost, and nothing of it runs
    with locked(job):
        status = judge(job, is_locked=True)
        if status.state not in FINAL:
            return status
        told, left = end_all(lambda: job_processes(job), term_s=SWEEP_S, settle_s=0)
        kept = with_remaining(status, left)._replace(swept=(status.swept or 0) + len(told))
        if kept != status and not status.damaged and status.supervisor is not None:
            write_status(job, kept)
        return kept._replace(ended=len(told - set(left)))


def with_remaining(status: Status, left: Sequence[Process]) -> Status:
    """An ended job's status with its current `remaining`: `left`, and processes that could not be ended before."""
    remaining = [*left, *(process for process in still_there(status.remaining) if process not in left)]
    return status._replace(remaining=tuple(map(describe, remaining)))


def _is_unswept(status: Status) -> bool:
    """Whether the job ended on this machine without a supervisor, which would have ended its remaining processes."""
    identity = status.supervisor
    here = identity is not None and (identity.machine_id, identity.boot_id) == (this_machine(), boot_id())
    return here and status.state in FINAL and status.swept is None
