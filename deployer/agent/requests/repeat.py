"""Repeats a job as a new one: gives the client the plan, and adds values that only this host has.

Stdlib only, Python 3.8: this package runs on the host.
"""

import os
import shutil
from typing import Dict

from ..host.errors import AgentError
from ..host.layout import Root
from ..host.typed import InvalidData, to_json
from ..job.plan import Plan, trees_of
from ..job.record import Record, plan_of, read_record
from ..job.views import OfJob, OriginalView
from ..store.content import Store
from ..wire.conversation import Call
from .jobs import find_folder
from .launch import LaunchRequest


def original(root: Root, call: Call) -> None:
    """Sends the plan that a job was launched with, whatever its state, without later changes by a resume."""
    job = find_folder(root, call.read(OfJob).job)
    try:
        record = _at_launch(read_record(job))
        plan = plan_of(job, record)
    except InvalidData as damage:
        raise AgentError("usage", "the plan of %s cannot be used: %s" % (job.id, damage), "launch it anew") from None
    store = Store(root)
    found = OriginalView(job.id, record.plan, all(map(store.has_tree, trees_of(plan))))
    call.send_event("original", to_json(found))


def _at_launch(record: Record) -> Record:
    first = min(record.resumed, key=lambda one: one.attempt, default=None)
    return record if first is None or first.plan_before is None else record._replace(plan=first.plan_before)


def with_values_of(root: Root, request: LaunchRequest, plan: Plan) -> LaunchRequest:
    """Adds the --env values of the repeated job that the new plan names; values of the request take precedence. The old
    values never leave the host."""
    record = _record(root, request.like)
    kept = {name: value for name, value in record.env.items() if name in plan.env_names}
    env: Dict[str, str] = {**kept, **request.env}
    return request._replace(env=env, git=request.git or record.git)


def _record(root: Root, job_id: str) -> Record:
    try:
        return read_record(find_folder(root, job_id))
    except (AgentError, InvalidData):
        message = "the --env values of %s are not there any more" % job_id
        raise AgentError("usage", message, "give them again: --env NAME=VALUE") from None


def copy_patch(root: Root, job_id: str, folder: str) -> None:
    """Copies the file of the project's uncommitted changes."""
    patch = os.path.join(root.jobs, job_id, "git.patch")
    if os.path.isfile(patch):
        shutil.copyfile(patch, os.path.join(folder, "git.patch"))
