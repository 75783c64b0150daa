"""--after at a launch: finds the awaited jobs and checks them before any file is sent.

Stdlib only, Python 3.8: this package runs on the host.
"""

import os
from typing import List, Sequence, Tuple

from ..host.errors import AgentError
from ..host.layout import Job, Root
from ..job.judge import judge
from ..job.plan import Plan, wanted_gpus
from ..job.record import read_plan, read_record
from ..job.status import QUEUED, Status, read_status
from ..supervisor import start
from ..unattended.after import decide
from .jobs import find_job
from .launch import LaunchRequest, base_env, launch_input


def still_awaited(root: Root, plan: Plan) -> Tuple[str, ...]:
    """The whole IDs of the jobs that the plan's job must wait for; empty if all have succeeded. Raises AgentError for a
    job that is not on this host, or that has ended without success."""
    found = list(dict((_find(root, text, plan)) for text in plan.policy.after).items())
    decision = decide(found)
    if decision.refusal:
        hint = "start that one again, deploy.py resume %s; or leave --after out" % decision.failed_job
        raise AgentError("usage", "%s would never start: it is to start %s" % (plan.job_id, decision.refusal), hint)
    if _waits_for(root, plan.job_id, decision.awaited):
        what = "%s waits for %s itself, so neither would start" % (", ".join(decision.awaited), plan.job_id)
        raise AgentError("usage", what, "leave --after out")
    if not decision.awaited:
        return ()
    _check_gpus(plan)
    return tuple(job_id for job_id, _ in found)


def _find(root: Root, text: str, plan: Plan) -> Tuple[str, Status]:
    try:
        job = find_job(root, text)
    except AgentError as error:
        hint = "it takes jobs of the same host and --remote-root: deploy.py ps lists them"
        raise AgentError(error.kind, "--after %s: %s" % (text, error.message), hint) from None
    if job.id == plan.job_id:
        raise AgentError("usage", "--after %s is this job itself" % text, "leave --after out")
    status = judge(job)
    if status.on_host:
        what = "--after %s: %s is a job of host %s" % (text, job.id, status.on_host)
        raise AgentError("usage", what, "it takes jobs of the same host: launch this one there")
    return job.id, status


def _waits_for(root: Root, job_id: str, others: Sequence[str]) -> bool:
    """Whether one of the others waits for this job, which is about to start its next attempt."""
    todo: List[str] = list(others)
    seen = set(todo)
    while todo:
        other = read_status(root.job(todo.pop()))
        more = other.after if other is not None and other.state == QUEUED else ()
        if job_id in more:
            return True
        todo += [one for one in more if one not in seen]
        seen.update(more)
    return False


def _check_gpus(plan: Plan) -> None:
    """Raises AgentError for GPUs that the host does not have: the user should not learn that hours later."""
    wanted = wanted_gpus(plan)
    if wanted is not None:
        from ..gpus import claim

        claim.would_get(wanted, base_env())


def wait_again(job: Job) -> None:
    """Starts a new supervisor for a waiting job whose supervisor was killed before the job started. It gets the former
    one's input, as far as that is stored."""
    root = Root(os.path.dirname(os.path.dirname(job.path)))
    status, record, plan = judge(job), read_record(job), read_plan(job)
    request = LaunchRequest(record.plan, env=record.env, attempt=status.attempt)
    given = launch_input(root, plan, request, base_env(), None)
    start.spawn(job, given._replace(adopt=True, after=status.after))
