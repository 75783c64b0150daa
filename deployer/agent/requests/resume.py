"""Starts the next attempt of an ended job: same ID, folder and code, and what it saved to continue from.

Stdlib only, Python 3.8: this package runs on the host.
"""

import os
import time
from typing import Optional

from ..host.errors import AgentError
from ..host.files import remove, write_whole
from ..host.layout import Job, Root
from ..host.locks import locked, store_in_use
from ..host.machine import boot_id
from ..host.marks import ProcessSnapshot
from ..host.processes import still_there
from ..host.typed import InvalidData, to_json
from ..job import progress
from ..job.judge import judge
from ..job.plan import Plan
from ..job.record import RawPlan, Record, Resumed, known_record, plan_hash, plan_of, read_record, write_record
from ..job.status import FINAL, Status, read_status
from ..job.stop import request_stop
from ..job.views import Ack, OfJob, PlanView
from ..logs.read import LogReader
from ..store.content import Store
from ..supervisor import start
from ..wire.conversation import Call
from .follow import follow_job
from .jobs import GONE_S, find_job
from .launch import LaunchRequest, check_root, plan_in, start_next


def show_plan(root: Root, call: Call) -> None:
    """Sends what a client needs to resume a job: its plan, its last attempt, and the step from which it would
    continue."""
    job = find_job(root, call.read(OfJob).job)
    now = judge(job)
    _check_ended(job, now)
    try:
        record = read_record(job)
        plan_of(job, record)
    except InvalidData as damage:
        raise AgentError("usage", "the plan of %s cannot be used: %s" % (job.id, damage), "launch it anew") from None
    found = PlanView(job.id, record.plan, now.attempt, progress.newest_checkpoint(job))
    call.send_event("plan", to_json(found))


def resume(root: Root, call: Call) -> None:
    """Starts the attempt that the client names, or acknowledges it if it was already started; then follows its log if
    requested."""
    request = call.read(LaunchRequest)
    job = find_job(root, request.job)
    plan, number = plan_in(request.plan), request.attempt
    with store_in_use(root), locked(job):
        already = _is_started(job, request.plan, number)
        if not already:
            _check_resumable(job, number)
            check_root(root)
            _mend_code(root, job, plan)
            if call.cancelled.is_set():
                raise AgentError("host", "the resume was cancelled")
            start_next(root, job, plan, commit=lambda: _note(job, plan, request))
    ack = Ack(job.id, job.path, already, attempt=number)
    if call.revoked:
        request_stop(job, 0)
        call.send_event("ack", to_json(ack._replace(stopping=True)))
        raise AgentError("host", "the resume was cancelled")
    begun = read_status(job)
    call.send_event("ack", to_json(ack._replace(from_step=begun.resumed_from if begun is not None else None)))
    if request.follow:
        follow_job(job, call, LogReader(job, attempt=number))


def _is_started(job: Job, plan: RawPlan, number: int) -> bool:
    """Whether this attempt was already started with this plan. Raises AgentError if it was started with another one."""
    if not start.has_begun(job, number):
        return False
    noted = _noted(known_record(job), number)
    if noted is not None and noted.plan_hash == plan_hash(plan):
        return True
    message = "attempt %d of %s was started already, in another way" % (number, job.id)
    raise AgentError("usage", message, "look: deploy.py status %s" % job.id)


def _check_ended(job: Job, now: Status) -> None:
    if now.on_host:
        raise AgentError("usage", "%s is a job of host %s" % (job.id, now.on_host), "resume it there")
    if now.state not in FINAL:
        hint = "follow it: deploy.py logs %s; or first: deploy.py stop %s" % (job.id, job.id)
        raise AgentError("usage", "%s is still %s (attempt %d)" % (job.id, now.state, now.attempt), hint)


def _check_resumable(job: Job, number: int) -> None:
    now = judge(job, is_locked=True)
    _check_ended(job, now)
    if now.attempt != number - 1:
        raise AgentError("usage", "%s never began: %s" % (job.id, now.reason), "launch it anew")
    if not os.path.isdir(job.code):
        raise AgentError("usage", "the code of %s is not there any more: %s" % (job.id, job.code), "launch it anew")
    _await_gone(job, now)


def _mend_code(root: Root, job: Job, plan: Plan) -> None:
    """Restores files of the job's code that a power cut damaged: an empty program would exit with 0."""
    status = read_status(job)
    if status is not None and status.supervisor is not None and status.supervisor.boot_id == boot_id():
        return
    try:
        store = Store(root)
        if store.has_tree(plan.tree) or os.path.exists(job.listing):  # else somebody has removed both
            store.mend(plan.tree, job.path, job.listing)
    except AgentError as error:
        message = "the code of %s has been damaged, perhaps by a power cut: %s" % (job.id, error.message)
        raise AgentError("host", message, "launch it anew") from None


def _await_gone(job: Job, status: Status) -> None:
    """Waits for the old supervisor's end: it writes the final status just before, and only one may own a job. Raises
    AgentError if a process of the job is still there."""
    deadline = time.monotonic() + GONE_S
    found = ProcessSnapshot().of(job)
    while found.supervisors and not found.others and time.monotonic() < deadline:
        time.sleep(0.01)
        found = ProcessSnapshot().of(job)
    left = {*found.all, *still_there(status.remaining)}
    if left:
        pids = ", ".join(str(process.pid) for process in sorted(left)[:6])
        message = "%s has ended, and %d of its processes still run: pid %s" % (job.id, len(left), pids)
        raise AgentError("usage", message, "end them: deploy.py stop %s" % job.id)


def _note(job: Job, plan: Plan, request: LaunchRequest) -> LaunchRequest:
    """Writes the files in the job's folder that the next attempt reads; keeps the former plan and config. Returns the
    request with the values that the job was given before."""
    number, record = request.attempt, known_record(job) or Record(request.plan)
    again = _noted(record, number)  # a resume that was cut off before its supervisor began
    before = again.plan_before if again else record.plan
    entry = Resumed(number, plan_hash(request.plan), time.time(), before)
    earlier = tuple(r for r in record.resumed if r.attempt != number)
    env = {**record.env, **request.env}
    write_record(job, record._replace(plan=request.plan, env=env, resumed=(*earlier, entry)))
    if plan.config_yaml is not None:
        kept = os.path.join(job.path, "config.attempt_%d.yaml" % (number - 1))
        if os.path.exists(job.config) and not os.path.lexists(kept):
            os.rename(job.config, kept)
        write_whole(job.config, plan.config_yaml.encode(), sync=True)
    remove(job.stop)
    return request._replace(env=env)


def _noted(record: Optional[Record], number: int) -> Optional[Resumed]:
    return next((r for r in record.resumed if r.attempt == number), None) if record else None
