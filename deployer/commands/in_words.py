"""A job's status as text for people."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone

from deployer import terminal
from deployer.agent.host.layout import ALONE, LAUNCHER_LOG, GroupName, LogName
from deployer.agent.job.status import (
    FAILED,
    FINAL,
    LOST,
    QUEUED,
    RUNNING,
    STOPPED,
    SUCCEEDED,
    TOOL_FAILED,
    AttemptReport,
    Status,
)
from deployer.agent.job.views import JobView, Row
from deployer.jobs.registry import SeenJob

UNREACHABLE = "unreachable"
"""Shown as the state of a job whose host does not answer now."""

SILENT_S = 120.0
"""A line is shown about a running job that has written nothing for this long."""

# --- its state -------------------------------------------------------------------------------------------------------


def state_line(status: Status) -> str:
    """A job's state, with the exit code of a failed job or the reason of a lost one."""
    more = {FAILED: f"exit code {status.code}", LOST: status.reason}.get(status.state)
    return f"{status.state} ({more})" if more else status.state


def exit_code_of(final: Status) -> int:
    """The exit code of a command that followed a job to its end: the job's own code, 143 if stopped, 125 if lost."""
    return {SUCCEEDED: 0, STOPPED: 143, LOST: TOOL_FAILED}.get(final.state, final.code or 1)


def state_of(row: SeenJob) -> str:
    """A job's state as the tables show it."""
    if not row.trouble:
        return live_state(row.job)
    if row.seen_at is None:
        return f"{UNREACHABLE} (never seen)"
    return f"{UNREACHABLE} ({row.job.state} {terminal.age(since(row.seen_at) or 0)} ago)"


def live_state(job: Row | Status) -> str:
    """The state with further facts in parentheses, such as the queue position."""
    if job.state == FAILED:
        return FAILED if job.code is None else f"{FAILED}({job.code})"  # without a code: from this client's notes
    if job.state in FINAL:
        return job.state
    notes = [
        "unsupervised" if job.unsupervised else "",
        job.damaged[:80],
        f"on {job.on_host}" if job.on_host else "",
        f"position {job.queue.position}" if job.state == QUEUED and job.queue and job.queue.position else "",
        waits_line(job.after) if job.state == QUEUED and job.after else "",
        f"attempt {job.attempt}" if job.attempt > 1 else "",
    ]
    told = ", ".join(note for note in notes if note)
    return f"{job.state} ({told})" if told else job.state


def waits_line(after: Sequence[str]) -> str:
    """A text about the jobs that must succeed first."""
    more = f" and {len(after) - 2} more" if len(after) > 3 else ""
    return f"waits for {', '.join(after[:2] if more else after)}{more}"


def age_of(row: SeenJob) -> str:
    """A job's age, by the host's clock if the host reported it, plus the time since that report."""
    if row.job.age_s is not None:
        return terminal.age(row.job.age_s + (since(row.seen_at) or 0))
    age_s = since(row.job.created)
    return "?" if age_s is None else terminal.age(age_s)


def since(then: str | None) -> float | None:
    """Seconds since a time in the format of rows; None if there is no valid time."""
    try:
        return (datetime.now(timezone.utc) - datetime.fromisoformat(str(then).replace("Z", "+00:00"))).total_seconds()
    except (ValueError, TypeError):
        return None


# --- its attempts ----------------------------------------------------------------------------------------------------


def attempt_line(status: Status) -> str | None:
    """The attempt's number, the end of the previous attempt, and the step from which this one continues; None if there
    is no previous attempt."""
    number, most = status.attempt, status.max_attempts
    former = next((report for report in status.attempts if report.attempt == number - 1), None)
    if former is None:
        return None
    limit = f" of at most {most}" if most > status.first_attempt else ""
    return f"attempt {number}{limit}, after attempt {number - 1} ended: {_ended(former)}; {_goes_on(status)}"


def _ended(report: AttemptReport) -> str:
    reason, step = report.reason or report.state, report.step
    told = reason if step is None or f"step {step}" in reason else f"{reason}, at step {step}"
    return "; ".join([told, *report.causes[:1]])


def _goes_on(status: Status) -> str:
    return "starts again" if status.resumed_from is None else f"goes on from step {status.resumed_from}"


def group_of(folder: str) -> GroupName:
    """Role and node of a group of processes from its folder name; the default if the host sent an invalid name."""
    return GroupName.parse(folder) or ALONE


def telling_log(status: Status) -> list[str] | None:
    """The options of `logs` that show the log that explains a failure best; None if all logs are empty."""
    if status.log == "":
        return None
    name = LogName.parse(status.log) if status.log is not None else None
    if name is None:  # the host did not choose a log: take the rank that failed first, or its group if no rank is known
        group, rank = group_of(status.first_failing_group), status.first_failing_rank
    else:
        group, rank = name.group, name.rank
    launcher = ["--launcher"] if rank is None and (name is None or name.file == LAUNCHER_LOG) else []
    named = (("--role", group.role), ("--node", group.node), ("--rank", rank))
    return [*launcher, *(word for option, value in named if value is not None for word in (option, str(value)))]


def stall_lines(status: Status) -> list[str]:
    """What each rank of a stalled attempt did when the stall was found; empty if the attempt did not stall."""
    return [
        f"{group_of(rank.group).rank(rank.rank)} {'still ran' if rank.running else 'had ended'}; "
        + (f"its last line: {rank.last_line}" if rank.last_line else "it had said nothing")
        for rank in status.stalled
    ]


def silence_line(view: JobView) -> str | None:
    """`no log for 10m`, for a running job without output; else None."""
    if view.status.state != RUNNING or view.silent_s is None or view.silent_s < SILENT_S:
        return None
    return f"no log for {terminal.age(view.silent_s)}"
