"""What a host says of a job, in words for a person."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from deployer import terminal
from deployer.agent.job.status import FINAL, RUNNING
from deployer.jobs.registry import Row

SILENT_S = 120.0
"""A running job that has written nothing for so long is worth a line."""

# --- its state -------------------------------------------------------------------------------------------------------


def state_line(found: dict[str, Any]) -> str:
    """A job's state in words."""
    more = {"failed": f"exit code {found.get('code')}", "lost": found.get("reason")}.get(found["state"])
    return f"{found['state']} ({more})" if more else str(found["state"])


def exit_code_of(final: dict[str, Any]) -> int:
    """What a command that followed a job to its end returns: the job's own code, 143 when stopped, 125 when lost."""
    fixed = {"succeeded": 0, "stopped": 143, "lost": 125}
    return fixed[final["state"]] if final["state"] in fixed else int(final.get("code") or 1)


def state_of(row: Row) -> str:
    """A job's state in the words of the table."""
    state = str(row["state"])
    if state == "unreachable":
        if row.get("last_state") is None:
            return "unreachable (never seen)"
        return f"unreachable ({row['last_state']} {terminal.age(_since(row.get('seen_at')) or 0)} ago)"
    if state == "failed":
        return f"failed({row.get('code')})"
    notes = []
    if row.get("unsupervised"):
        notes.append("unsupervised")
    if state not in FINAL and row.get("damaged"):
        notes.append(str(row["damaged"])[:80])
    if state not in FINAL and row.get("on_host"):
        notes.append(f"on {row['on_host']}")
    position = (row.get("queue") or {}).get("position") if isinstance(row.get("queue"), dict) else None
    if state == "queued" and position:
        notes.append(f"position {position}")
    if state not in FINAL and (row.get("attempt") or 1) != 1:
        notes.append(f"attempt {row['attempt']}")
    return f"{state} ({', '.join(notes)})" if notes else state


def age_of(row: Row) -> str:
    """How old a job is, by the host's own clock where it tells; what went by since it was last seen is added."""
    age_s = row.get("age_s")
    if isinstance(age_s, (int, float)):
        return terminal.age(age_s + (_since(row.get("seen_at")) or 0))
    since = _since(row.get("created"))
    return "?" if since is None else terminal.age(since)


def _since(then: object) -> float | None:
    try:
        return (datetime.now(timezone.utc) - datetime.fromisoformat(str(then).replace("Z", "+00:00"))).total_seconds()
    except (ValueError, TypeError):
        return None


# --- its attempts ----------------------------------------------------------------------------------------------------


def number_of(status: Mapping[str, Any]) -> int:
    """The attempt that a status speaks of."""
    try:
        return int(status.get("attempt") or 1)
    except (TypeError, ValueError):
        return 1


def attempt_line(status: Mapping[str, Any]) -> str | None:
    """Which attempt this is, how the former one ended, and where this one goes on; None for the first."""
    number = number_of(status)
    former = [a for a in status.get("attempts") or [] if isinstance(a, dict) and number_of(a) == number - 1]
    if number == 1 or not former:
        return None
    most, first = status.get("max_attempts"), status.get("first_attempt")
    limit = f" of at most {most}" if isinstance(most, int) and most != first else ""
    return f"attempt {number}{limit}, after attempt {number - 1} ended: {_ended(former[0])}; {_goes_on(status)}"


def _ended(attempt: Mapping[str, Any]) -> str:
    reason = str(attempt.get("reason") or attempt.get("state"))
    step = attempt.get("step")
    return reason if step is None or f"step {step}" in reason else f"{reason}, at step {step}"


def _goes_on(status: Mapping[str, Any]) -> str:
    step = status.get("resumed_from")
    if step is not None:
        return f"goes on from step {step}"
    return "starts again"


def stall_lines(status: Mapping[str, Any]) -> list[str]:
    """What each rank of a stalled attempt did when it was found; empty for one that did not stall."""
    ranks = [rank for rank in status.get("stalled") or [] if isinstance(rank, dict)]
    return [
        f"rank {rank.get('rank')} {'still ran' if rank.get('running') else 'had ended'}; "
        + (f"its last line: {rank['last_line']}" if rank.get("last_line") else "it had said nothing")
        for rank in ranks
    ]


def silence_line(status: Mapping[str, Any]) -> str | None:
    """`no log for 10m` of a job that runs without a word."""
    silent_s = status.get("silent_s")
    if status.get("state") != RUNNING or not isinstance(silent_s, int | float) or silent_s < SILENT_S:
        return None
    return f"no log for {terminal.age(silent_s)}"
