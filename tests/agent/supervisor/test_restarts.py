"""What is decided about attempts: whether to start again, whether one has stalled, who killed a rank."""

from __future__ import annotations

from typing import Any

import pytest

from deployer.agent.host import cgroups
from deployer.agent.host.processes import Process
from deployer.agent.job import ending
from deployer.agent.job.status import FAILED, RUNNING, AttemptReport, State, Status
from deployer.agent.job.views import JobView
from deployer.agent.supervisor.restarts import Past, backoff_s, why_no_restart
from deployer.agent.supervisor.stall import StallWatch, duration
from deployer.commands.in_words import attempt_line, silence_line


def past(code: int = 1, *, state: State = FAILED, started: bool = True, words: str = "", step: int | None = 5) -> Past:
    return Past(state, code, started, words, step)


def decide(*history: Past, most: int = 3, is_trainer: bool = True) -> str | None:
    return why_no_restart(history, restarts=len(history) - 1, max_restarts=most, is_trainer=is_trainer)


# --- restarts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("last", "is_trainer", "expected"),
    [
        (past(0, state="succeeded"), True, "it has not failed"),
        (past(143, state="stopped"), True, "it has not failed"),
        (past(125, state="lost"), True, "it has not failed"),
        (past(125, started=False), True, "it could not be started"),
        (past(126), False, "the program cannot be executed"),
        (past(127), False, "the program was not found"),
        (past(2), True, "a mistake in the config or the data does not heal"),
        (past(2), False, None),
        (past(137), True, None),
        (past(124), False, None),
        (past(1), True, None),
    ],
)
def test_which_ends_can_heal(last: Past, is_trainer: bool, expected: str | None) -> None:
    assert decide(last, is_trainer=is_trainer) == expected


def test_the_number_of_restarts_is_a_bound() -> None:
    tries = [past(step=n) for n in range(4)]
    assert [decide(*tries[:n], most=2) for n in (1, 2, 3)] == [None, None, "all 2 restarts are used up"]


def test_same_error_at_the_same_step_ends_it_whatever_numbers_it_names() -> None:
    first, again = past(words="Error: 0x7f12 at rank 3, pid 4711"), past(words="Error: 0xab99 at rank 3, pid 12")
    assert decide(first, again) == "the same error a second time, at step 5"
    assert decide(first, past(137, step=7), again) == "the same error a second time, at step 5"
    assert decide(first._replace(step=None), again._replace(step=None)) == (
        "the same error a second time, before the first step"
    )


@pytest.mark.parametrize("changed", [{"code": 137}, {"step": 6}, {"step": None}, {"words": "another"}])
def test_another_code_step_or_error_may_heal(changed: dict[str, Any]) -> None:
    first = past(words="Error: x")
    assert decide(first, first._replace(**changed)) is None


def test_program_repeats_itself_when_code_and_last_line_are_equal_to_the_letter() -> None:
    def tries(*lines: str) -> str | None:
        return decide(*(past(step=None, words=line) for line in lines), is_trainer=False)

    assert tries("row 7 is broken", "row 7 is broken") == "the same error a second time, after the same last line"
    assert tries("row 7", "row 8") is None
    assert tries("", "") is None  # a program that says nothing cannot be told to repeat itself


def test_waits_grow_and_end_at_half_a_minute() -> None:
    assert [backoff_s(n) for n in range(5)] == [1, 5, 30, 30, 30]


# --- stalls ----------------------------------------------------------------------------------------------------------


def test_stall_is_found_once_nothing_has_changed_for_so_long() -> None:
    now, seen = [0.0], [0]
    watch = StallWatch(lambda: seen[0], 10, now=lambda: now[0])
    found = []
    for at, value in ((5, 0), (9, 1), (18, 1), (18.5, 1), (19.1, 1)):
        now[0], seen[0] = at, value
        found.append(watch.is_stalled())
    assert found == [False, False, False, False, True]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (2.5, "2.5s"), (45, "45s"), (600, "10m"), (5400, "1h30m"), (90061, "1d1h1m1s")]
)
def test_durations_are_written_as_the_options_take_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


# --- out of memory ---------------------------------------------------------------------------------------------------

Kills = cgroups.OomKills


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (Kills(0, 3), Kills(1, 4), True),
        (Kills(0, 3), Kills(0, 4), False),  # somebody else's on this host
        (Kills(None, 3), Kills(None, 4), True),
        (Kills(None, 3), Kills(None, 3), False),
        (Kills(None, None), Kills(None, None), False),
        (Kills(None, 3), Kills(1, 3), False),
    ],
)
def test_kernels_kill_is_read_from_the_own_group_first(before: Kills, after: Kills, expected: bool) -> None:
    assert cgroups.has_killed(before, after) is expected


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("low 0\nhigh 0\nmax 12\noom 2\noom_kill 1\noom_group_kill 0\n", 1),
        ("oom_kill_disable 0\nunder_oom 0\noom_kill 7\n", 7),
        ("nr_free_pages 1\n", None),
        ("", None),
    ],
)
def test_counters_of_every_kind_of_file_are_read(text: str, count: int | None) -> None:
    assert cgroups.parse_oom_kill(text) == count


def test_own_control_group_is_found_in_both_versions() -> None:
    assert cgroups.oom_files("0::/user.slice/a\n") == [
        "/sys/fs/cgroup/user.slice/a/memory.events",
        "/sys/fs/cgroup/memory.events",
    ]
    assert cgroups.oom_files("9:name=systemd:/\n4:memory:/box\n2:cpu,cpuacct:/\n") == [
        "/sys/fs/cgroup/memory/box/memory.oom_control",
        "/sys/fs/cgroup/memory/memory.oom_control",
    ]


def test_reason_of_a_rank_that_the_kernel_killed_says_so_and_what_to_do() -> None:
    ranks = [ending.RankRecord(1, 5, 1, Process(4, 1), code=137, signal=9)]
    found = ending.decide_ending(ending.Evidence(ranks, [ending.GroupEnd(2, launcher_code=1)]))
    assert found is not None
    assert found.reason == "rank 1 was killed by SIGKILL (often the host ran out of memory)"
    memory = ending.OomKill(cgroups.OomWatch.REASON, cgroups.OomWatch.HINT)
    told = ending.with_oom(found, memory)
    assert told.reason == "rank 1 was killed by SIGKILL; the kernel ended it: out of memory"
    assert "memory limit" in told.hint


@pytest.mark.parametrize(("code", "signum"), [(7, None), (143, 15)])
def test_other_ends_are_not_taken_for_the_kernels(code: int, signum: int | None) -> None:
    found = ending.Ending("failed", code, "rank 0 …", 0, signum)
    assert ending.with_oom(found, ending.OomKill("x", "y")) == found


# --- in words --------------------------------------------------------------------------------------------------------


KILLED = "after attempt 1 ended: rank 1 was killed by SIGKILL, at step 340"


def status(**changes: Any) -> Status:
    former = AttemptReport(1, FAILED, reason="rank 1 was killed by SIGKILL", step=340)
    base = Status(RUNNING, attempt=2, first_attempt=1, max_attempts=4, attempts=(former,), resumed_from=300)
    return base._replace(**changes)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, f"attempt 2 of at most 4, {KILLED}; goes on from step 300"),
        ({"max_attempts": 2, "first_attempt": 2}, f"attempt 2, {KILLED}; goes on from step 300"),
        ({"resumed_from": None}, f"attempt 2 of at most 4, {KILLED}; starts again"),
        ({"attempt": 1, "attempts": ()}, None),
    ],
)
def test_line_of_an_attempt_names_the_former_end_and_the_new_beginning(changes: dict[str, Any], line: str) -> None:
    assert attempt_line(status(**changes)) == line


@pytest.mark.parametrize(
    ("state", "silent_s", "line"),
    [(RUNNING, 600.0, "no log for 10m"), (RUNNING, 60.0, None), (FAILED, 600.0, None), (RUNNING, None, None)],
)
def test_silence_of_a_running_job_is_told(state: State, silent_s: float | None, line: str | None) -> None:
    assert silence_line(JobView("j", Status(state), silent_s=silent_s)) == line
