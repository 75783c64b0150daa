"""A job's attempts in words, from the status that its host sends: pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deployer.agent.status import RUNNING
from deployer.render import age

SILENT_S = 120.0
"""A running job that has written nothing for so long is worth a line."""


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
    return f"no log for {age(silent_s)}"
