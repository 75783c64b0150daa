"""How a job ended, from the records of its ranks and what its launcher said: pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from deployer.agent.host.layout import ALONE, GroupName
from deployer.agent.host.processes import Process
from deployer.agent.job import ending
from deployer.agent.job.stop import StopRequest


def record(number: int, code: int | None, *, at: int = 0, signum: int | None = None) -> ending.RankRecord:
    return ending.RankRecord(number, 100 + number, 1, Process(200, 1), code, signum, at, at)


def test_first_failing_rank_gives_the_code_whatever_the_launcher_says() -> None:
    ranks = [record(0, 1, at=20), record(1, 137, at=10, signum=9)]
    found = decide(ranks, 2, 1)
    assert found is not None
    assert (found.state, found.code, found.first_failing_rank, found.signal) == ("failed", 137, 1, 9)


def decide(
    ranks: Sequence[ending.RankRecord], nproc: int, code: int | None, log: str = "", stop_s: float | None = None
) -> ending.Ending | None:
    """Of a job with one group. `code` and `log`: of its launcher."""
    stop = None if stop_s is None else StopRequest(1, 1, stop_s, stop_s + 1)
    return ending.decide_ending(ending.Evidence(ranks, [ending.GroupEnd(nproc, ALONE, code, log)], stop))


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
    found = decide([record(0, None)], 2, 1, TORCHRUN_LAST_WORDS)
    assert found is not None and (found.code, found.first_failing_rank, found.signal) == (137, 1, 9)


def test_rank_that_was_killed_with_its_wrapper_is_the_cause_not_those_that_torchrun_ended_then() -> None:
    ranks = [record(0, 143, at=10, signum=15), record(1, None)]
    found = decide(ranks, 2, 1, TORCHRUN_LAST_WORDS)
    assert found is not None and (found.code, found.first_failing_rank, found.signal) == (137, 1, 9)


def test_launchers_own_code_is_the_third_source() -> None:
    found = decide([], 2, 143)
    assert found is not None and (found.state, found.code, found.first_failing_rank) == ("failed", 143, None)


@pytest.mark.parametrize(
    ("codes", "requested_at_s", "expected"),
    [((0, 0), 5.0, "stopped"), ((0, 0), 50.0, "succeeded"), ((0, 3), 50.0, "failed"), ((143, 0), 5.0, "stopped")],
)
def test_stop_requested_before_the_end_makes_it_stopped(codes: Any, requested_at_s: float, expected: str) -> None:
    ranks = [record(i, code, at=10_000_000_000) for i, code in enumerate(codes)]
    found = decide(ranks, 2, 0, stop_s=requested_at_s)
    assert found is not None and found.state == expected


def test_ranks_without_records_and_no_launcher_tell_nothing() -> None:
    assert decide([record(0, 0)], 2, None) is None


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
    found = decide([record(0, 135, signum=7)], 1, 1)
    assert found is not None and found.reason == (
        "rank 0 was killed by SIGBUS (often a mapped file became shorter, its disk failed, or /dev/shm is full)"
    )


# --- several groups ---------------------------------------------------------------------------------------------------

SERVER, NODE_0, NODE_1 = GroupName("program", None), GroupName("trainer", 0), GroupName("trainer", 1)


def ends(server: int | None = None, *, at: int = 0) -> list[ending.GroupEnd]:
    """A trainer on two nodes, and beside it a server whose launcher ended with this code at that time."""
    return [ending.GroupEnd(1, NODE_0), ending.GroupEnd(1, NODE_1), ending.GroupEnd(1, SERVER, server, "", at)]


def of(group: GroupName, code: int | None, at: int) -> ending.RankRecord:
    return record(0, code, at=at)._replace(group=group)


@pytest.mark.parametrize(
    ("ranks", "server", "expected"),
    [
        ([of(NODE_0, 0, 10), of(NODE_1, 0, 20), of(SERVER, None, 0)], None, ("succeeded", 0, "")),
        ([of(NODE_0, 0, 10), of(NODE_1, 0, 20), of(SERVER, 143, 30)], None, ("succeeded", 0, "")),
        ([of(NODE_0, 0, 10), of(NODE_1, 0, 20), of(SERVER, 3, 15)], None, ("failed", 3, "program")),
        ([of(NODE_0, 137, 30), of(NODE_1, 0, 20), of(SERVER, 3, 15)], None, ("failed", 3, "program")),
        ([of(NODE_0, 5, 10), of(NODE_1, 137, 20), of(SERVER, 3, 15)], None, ("failed", 5, "trainer/node0")),
        ([of(NODE_0, 137, 30), of(NODE_1, 137, 30)], 4, ("failed", 4, "program")),
        ([of(NODE_0, 0, 10), of(SERVER, 0, 15)], None, None),
    ],
    ids=["server runs on", "ended after", "failed before", "took others along", "main first", "no record", "lost"],
)
def test_first_failure_up_to_the_main_roles_end_is_the_jobs(ranks: Any, server: int | None, expected: Any) -> None:
    found = ending.decide_ending(ending.Evidence(ranks, ends(server, at=12)))
    assert (found and (found.state, found.code, found.first_failing_group)) == expected


def test_stop_after_the_main_roles_end_changes_nothing() -> None:
    ranks = [of(NODE_0, 0, 10), of(NODE_1, 0, 10**9), of(SERVER, 143, 10**11)]
    found = [
        ending.decide_ending(ending.Evidence(ranks, ends(), StopRequest(1, 1, at_s, at_s + 1))) for at_s in (0.5, 2.0)
    ]
    assert [end and end.state for end in found] == ["stopped", "succeeded"]
