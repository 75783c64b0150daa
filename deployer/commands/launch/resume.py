"""`resume`: the next attempt of a job that has ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from deployer.agent.job.plan import Plan, is_alone
from deployer.agent.job.status import Status
from deployer.commands.launch.run import check_followed, follow_through, with_secrets
from deployer.commands.launch.spec import tell_note
from deployer.connection.host import Host
from deployer.jobs.registry import JobRecord, read_records
from deployer.launch.start import resume_and_follow
from deployer.plan.env_file import env_file_of
from deployer.plan.next_attempt import Resumable, beginning, plan_next, read_resumable
from deployer.plan.notify import read_notify, with_urls
from deployer.plan.options import Options
from trainer.config.load import key_of


def resume(
    host: Host,
    job_id: str,
    *,
    overrides: tuple[str, ...],
    changes: dict[str, Any],
    notify: tuple[str, ...],
    give_up_s: float,
    **ways: Any,
) -> int:
    """Starts the next attempt of a job that has ended, and follows it as `run` does. Returns the exit code.

    `changes`: fields of Options from the command line. `ways`: arguments of `follow_through`.
    """
    whom = read_notify(notify)
    check_followed(whom, detach=ways["detach"])
    job = read_resumable(host, job_id)
    options = Options(overrides=overrides, **changes)
    plan, payload, record = next_of(job, options, host, urls=whom.urls, tell=tell_note)
    attempt = job.attempt + 1

    def start(screen: Any, view: Any) -> Status | None:
        screen.beginning = f"{job.job_id}: attempt {attempt}, {beginning(job, plan)}"
        return resume_and_follow(
            host.connect, plan, attempt=attempt, payload=payload, view=view, watcher=screen, give_up_s=give_up_s
        )

    return follow_through(start, host, record, bare=is_alone(plan), commands=whom.commands, **ways)


def next_of(
    job: Resumable, options: Options, host: Host, *, urls: Sequence[str], tell: Callable[[str], None]
) -> tuple[Plan, dict[str, Any], JobRecord]:
    """The plan of the next attempt, its payload, and this client's new record of the job. `tell`: called with notes
    about settings that have no effect, and about differences from the last attempt."""
    record, options = record_of(job, host), with_whole_ids(options, host)
    env_file = env_file_of(named_env_file(options) or record.env_file or None)
    plan, payload = plan_next(job, options, known=record.secrets, env_file=env_file, tell=tell)
    if note := told_no_more(job.plan, urls):
        tell(note)
    plan, payload = with_urls(plan, payload, urls)
    return plan, payload, with_secrets(record, plan, env_file)


def with_whole_ids(options: Options, host: Host) -> Options:
    """The options with complete IDs in --after, as far as this client knows them."""
    waits = options.keys.get("target.after")
    if not waits:
        return options
    from deployer.jobs.after import whole_ids

    return replace(options, keys={**options.keys, "target.after": whole_ids(waits, host)})


def told_no_more(plan: Plan, urls: Sequence[str]) -> str:
    """A note about URLs that got events of this job and will get no more; empty if there are none."""
    if urls or not plan.policy.notify:
        return ""
    return f"{', '.join(plan.policy.notify)} is told no more: a URL is kept nowhere; --notify names it anew"


def named_env_file(options: Options) -> str:
    """The env file that the command line names; empty if it names none."""
    given = [text.partition("=")[2] for text in options.overrides if key_of(text) == "target.env_file"]
    return str(options.keys.get("target.env_file") or (given[-1] if given else ""))


def record_of(job: Resumable, host: Host) -> JobRecord:
    """This client's record of the job; a new one for a job that was launched from another machine."""
    kept = [r for r in read_records() if (r.job_id, r.ssh, r.root) == (job.job_id, host.ssh, host.root)]
    if kept:
        return kept[0]
    place = (host.ssh, host.root, str(Path.cwd() / "results" / job.job_id))
    return JobRecord(job.job_id, job.plan.name, *place, job.plan.created, host.ssh_key, host.transport)
