"""Decides whether the supervisor restarts a failed job, from the attempts so far: pure functions.

Stdlib only, Python 3.8: this package runs on the host.
"""

import re
from typing import NamedTuple, Optional, Sequence

from ..job.status import FAILED, AttemptReport, State

BACKOFF_S = (1.0, 5.0, 30.0)
"""Seconds before the first, the second, and every later restart."""
USAGE_CODE = 2
"""The trainer's exit code for a mistake in config, data or model."""
NOT_STARTED_CODES = {126: "the program cannot be executed", 127: "the program was not found"}


class Past(NamedTuple):
    """An attempt that has ended."""

    state: State
    code: Optional[int]
    started: bool
    """Whether its command was started; False if the preparation failed."""
    words: str = ""
    """For a trainer, the error in outcome.json; for a program, the last log line of the rank that failed first."""
    step: Optional[int] = None
    """Its last step in metrics.jsonl; None for a program, and before the first step."""


def past_of(report: AttemptReport) -> Past:
    return Past(report.state, report.code, report.started_at is not None, report.error, report.step)


def why_no_restart(history: Sequence[Past], *, restarts: int, max_restarts: int, is_trainer: bool) -> Optional[str]:
    """Why the last attempt ends the job, after this many restarts; None if the next attempt should start."""
    last = history[-1]
    if last.state != FAILED:
        return "it has not failed"
    if not last.started:
        return "it could not be started"
    if last.code in NOT_STARTED_CODES:
        return NOT_STARTED_CODES[last.code]
    if is_trainer and last.code == USAGE_CODE:
        return "a mistake in the config or the data does not heal"
    if any(_is_same(last, earlier, is_trainer) for earlier in history[:-1]):
        return "the same error a second time, %s" % _place(last, is_trainer)
    if restarts >= max_restarts:
        return "all %d restarts are used up" % max_restarts
    return None


def backoff_s(restarts: int) -> float:
    """Seconds to wait before the next restart, after this many."""
    return BACKOFF_S[min(restarts, len(BACKOFF_S) - 1)]


def _is_same(one: Past, other: Past, is_trainer: bool) -> bool:
    """Whether two failures are the same. Trainer: same code, step and message, ignoring numbers in the message.
    Program: same code and the identical last log line, because its numbers show its progress; without output two
    failures never count as the same."""
    if one.code != other.code:
        return False
    if is_trainer:
        return one.step == other.step and _plain(one.words) == _plain(other.words)
    return bool(one.words) and one.words == other.words


def _place(attempt: Past, is_trainer: bool) -> str:
    if not is_trainer:
        return "after the same last line"
    return "before the first step" if attempt.step is None else "at step %d" % attempt.step


def _plain(words: str) -> str:
    return re.sub(r"0x[0-9a-fA-F]+|\d+", "#", words)
