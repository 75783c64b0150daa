"""Whether the supervisor starts a failed job again by itself: a pure decision on the attempts so far.

Stdlib only, Python 3.8: this package runs on the host.
"""

import re
from typing import NamedTuple, Optional, Sequence

from ..job.status import FAILED, AttemptReport, State

BACKOFF_S = (1.0, 5.0, 30.0)
"""Before the first, the second, and every later restart."""
USAGE_CODE = 2
"""The trainer's code for a mistake in config, data or model."""
NOT_STARTED_CODES = {126: "the program cannot be executed", 127: "the program was not found"}


class Past(NamedTuple):
    """An attempt that has ended."""

    state: State
    code: Optional[int]
    started: bool
    """Whether its command was started at all; False when the preparation failed."""
    words: str = ""
    """Of a trainer the error of its outcome.json; of a program the last log line of the rank that failed first."""
    step: Optional[int] = None
    """The last step that it noted in metrics.jsonl; None for a program, and before the first step."""


def past_of(report: AttemptReport) -> Past:
    return Past(report.state, report.code, report.started_at is not None, report.error, report.step)


def why_no_restart(history: Sequence[Past], *, restarts: int, max_restarts: int, is_trainer: bool) -> Optional[str]:
    """The reason why the last of these attempts, begun after so many restarts, is the job's end; None when the next one
    should be started."""
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
    """Seconds to wait before the next restart, after so many."""
    return BACKOFF_S[min(restarts, len(BACKOFF_S) - 1)]


def _is_same(one: Past, other: Past, is_trainer: bool) -> bool:
    """A trainer's errors are the same when code, step and words are, whatever numbers stand in the words (addresses,
    process ids). A program has no steps: its numbers tell how far it came, so code and last log line must be equal to
    the letter, and a program that says nothing may fail with the same code as often as it is allowed to."""
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
