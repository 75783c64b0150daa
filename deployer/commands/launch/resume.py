"""`resume`: the next attempt of a job that has ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deployer.agent.job.plan import is_alone
from deployer.agent.job.status import Status
from deployer.commands.launch.asked import tell_note
from deployer.commands.launch.run import check_followed, follow_through, with_secrets
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
    """Starts the next attempt of a job that has ended, and follows it as `run` does; its exit code is ours.

    `changes`: fields of Options that the command line gives. `ways`: how it is followed, for `follow_through`.
    """
    whom = read_notify(notify)
    check_followed(whom, detach=ways["detach"])
    job = read_resumable(host, job_id)
    record = record_of(job, host)
    if waits := changes["keys"].get("target.after"):
        from deployer.jobs.after import whole_ids

        changes["keys"]["target.after"] = whole_ids(waits, host)
    options = Options(overrides=overrides, **changes)
    env_file = env_file_of(named_env_file(options) or record.env_file or None)
    plan, payload = plan_next(job, options, known=record.secrets, env_file=env_file, tell=tell_note)
    if job.plan.policy.notify and not whom.urls:
        tell_note(f"{', '.join(job.plan.policy.notify)} is told no more: a URL is kept nowhere; --notify names it anew")
    plan, payload = with_urls(plan, payload, whom.urls)
    record = with_secrets(record, plan, env_file)
    attempt = job.attempt + 1

    def start(screen: Any, view: Any) -> Status | None:
        screen.beginning = f"{job.job_id}: attempt {attempt}, {beginning(job, plan)}"
        return resume_and_follow(
            host.connect, plan, attempt=attempt, payload=payload, view=view, watcher=screen, give_up_s=give_up_s
        )

    return follow_through(start, host, record, bare=is_alone(plan), commands=whom.commands, **ways)


def named_env_file(options: Options) -> str:
    """The one that the command line names; empty where it names none."""
    given = [text.partition("=")[2] for text in options.overrides if key_of(text) == "target.env_file"]
    return str(options.keys.get("target.env_file") or (given[-1] if given else ""))


def record_of(job: Resumable, host: Host) -> JobRecord:
    """This client's record of the job; a new one for a job that was launched from elsewhere."""
    kept = [r for r in read_records() if (r.job_id, r.ssh, r.root) == (job.job_id, host.ssh, host.root)]
    if kept:
        return kept[0]
    place = (host.ssh, host.root, str(Path.cwd() / "results" / job.job_id))
    return JobRecord(job.job_id, job.plan.name, *place, job.plan.created, host.ssh_key, host.transport)
