"""How a job ended, from the records of its ranks and what its launcher said: pure."""

from __future__ import annotations

from typing import Any

import pytest

from deployer.agent.host.processes import Process
from deployer.agent.job import ending


def record(number: int, code: int | None, *, at: int = 0, signum: int | None = None) -> ending.RankRecord:
    return ending.RankRecord(number, 100 + number, 1, Process(200, 1), code, signum, at, at)


def test_first_failing_rank_gives_the_code_whatever_the_launcher_says() -> None:
    ranks = [record(0, 1, at=20), record(1, 137, at=10, signum=9)]
    found = ending.decide_ending(ranks, nproc=2, launcher_code=1)
    assert found is not None
    assert (found.state, found.code, found.first_failing_rank, found.signal) == ("failed", 137, 1, 9)


TORCHRUN_LAST_WORDS = """
Failures:
  <NO_OTHER_FAILURES>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-01-02_03:04:05
  host      : box
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 4711)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 4711
"""


def test_torchruns_summary_is_the_second_source() -> None:
    found = ending.decide_ending([record(0, None)], nproc=2, launcher_code=1, launcher_log=TORCHRUN_LAST_WORDS)
    assert found is not None and (found.code, found.first_failing_rank, found.signal) == (137, 1, 9)


def test_rank_that_was_killed_with_its_wrapper_is_the_cause_not_those_that_torchrun_ended_then() -> None:
    ranks = [record(0, 143, at=10, signum=15), record(1, None)]
    found = ending.decide_ending(ranks, nproc=2, launcher_code=1, launcher_log=TORCHRUN_LAST_WORDS)
    assert found is not None and (found.code, found.first_failing_rank, found.signal) == (137, 1, 9)


def test_launchers_own_code_is_the_third_source() -> None:
    found = ending.decide_ending([], nproc=2, launcher_code=143, launcher_log="")
    assert found is not None and (found.state, found.code, found.first_failing_rank) == ("failed", 143, None)


@pytest.mark.parametrize(
    ("codes", "requested_at_s", "expected"),
    [((0, 0), 5.0, "stopped"), ((0, 0), 50.0, "succeeded"), ((0, 3), 50.0, "failed"), ((143, 0), 5.0, "stopped")],
)
def test_stop_requested_before_the_end_makes_it_stopped(codes: Any, requested_at_s: float, expected: str) -> None:
    ranks = [record(i, code, at=10_000_000_000) for i, code in enumerate(codes)]
    found = ending.decide_ending(ranks, nproc=2, launcher_code=0, stop_requested_mono=requested_at_s)
    assert found is not None and found.state == expected


def test_ranks_without_records_and_no_launcher_tell_nothing() -> None:
    assert ending.decide_ending([record(0, 0)], nproc=2, launcher_code=None) is None


@pytest.mark.parametrize(
    ("before", "outcome", "expected"),
    [
        (None, ending.Outcome("succeeded"), ("succeeded", 0)),
        (None, ending.Outcome("failed", "x", 0), None),
        (ending.Ending("succeeded", 0, "fine"), ending.Outcome("stopped"), ("stopped", 0)),
        (ending.Ending("failed", 7, "rank 1"), ending.Outcome("succeeded"), ("failed", 7)),
        (ending.Ending("failed", 7, "rank 1"), None, ("failed", 7)),
    ],
)
def test_trainers_outcome_fills_what_nobody_saw_and_contradicts_no_exit(
    before: Any, outcome: Any, expected: Any
) -> None:
    found = ending.with_outcome(before, outcome)
    assert (found and (found.state, found.code)) == expected


def test_reason_of_a_failed_trainer_has_its_own_words() -> None:
    outcome = ending.Outcome("failed", "Error: no row has a target token\n  in data.jsonl", 1)
    found = ending.with_outcome(ending.Ending("failed", 2, "rank 1 exited with code 2"), outcome)
    assert found is not None
    assert found.reason == "rank 1 exited with code 2; rank 1: Error: no row has a target token"


def test_sigbus_is_told_with_what_it_mostly_comes_from() -> None:
    found = ending.decide_ending([record(0, 135, signum=7)], nproc=1, launcher_code=1)
    assert found is not None and found.reason == (
        "rank 0 was killed by SIGBUS (often a mapped file became shorter, its disk failed, or /dev/shm is full)"
    )
