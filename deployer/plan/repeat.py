"""The plan of a repeated job: the earlier plan with the changes of the command line, under a new ID."""

from __future__ import annotations

from collections.abc import Callable, Collection
from datetime import datetime, timezone
from typing import Any, NamedTuple

from deployer.agent.host.layout import JOB_ID_ENV
from deployer.agent.job.plan import Plan
from deployer.agent.job.views import OriginalView
from deployer.connection.host import Host
from deployer.plan.env_file import EnvFile
from deployer.plan.launch_plan import new_job_id
from deployer.plan.next_attempt import Resumable, plan_from, plan_next
from deployer.plan.options import Options


class Original(NamedTuple):
    """The job to repeat, as it was launched."""

    job: Resumable
    whole: bool
    """Whether all its files are on the host."""


def read_original(host: Host, job_id: str) -> Original:
    with host.connect(request={"op": "original", "job": job_id}) as link:
        call = link.first
        found = call.result("original", OriginalView)
        call.check_job_id(found.job_id, "original.job_id")
    plan = plan_from(host, job_id, found.plan)
    return Original(Resumable(found.job_id, plan, attempt=0, from_step=None), found.whole)


def plan_again(
    job: Resumable,
    options: Options,
    *,
    known: Collection[str],
    env_file: EnvFile | None = None,
    tell: Callable[[str], None] = lambda note: None,
) -> tuple[Plan, dict[str, Any]]:
    """The plan of a new job that repeats this one, and the values that are sent beside it; see `plan_next`."""
    plan, payload = plan_next(job, options, known=known, env_file=env_file, tell=tell)
    job_id = new_job_id(plan.name)
    created = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    roles = tuple(role._replace(env={**role.env, JOB_ID_ENV: job_id}) for role in plan.roles)
    return plan._replace(job_id=job_id, created=created, roles=roles), payload
