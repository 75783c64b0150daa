"""The watchdog: late, gone and failed ranks are named, and every rank ends; slow saves and data do not trip it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.limits import FOREVER_S, HANG_S, PATIENCE
from tests.support.ranks import barrier, run_ranks
from trainer.dist import Dist
from trainer.failures.heartbeat import Heartbeat, Observer, RankView, judge, late_ranks
from trainer.failures.watchdog import machine_id, process_ended, watching
from trainer.start.rank import comm_timeout_s

TIMEOUT_S = 2.0 * PATIENCE


def beat(rank: int, **changes) -> Heartbeat:
    fields = {"step": 5, "phase": "forward", "count": 20, "waiting": False, "where": "loss.py:3 (loss)", "serial": 7}
    return Heartbeat(**{"rank": rank, "host": "h", "machine": "h", "pid": 100 + rank, **fields, **changes})


def seen(rank: int, *, silent_s: float = 0, still_s: float = 0, ended_s: float | None = None, **changes) -> RankView:
    return RankView(beat(rank, **changes), silent_s=silent_s, still_s=still_s, ended_s=ended_s)


def verdict_on(*ranks: RankView):
    return judge(ranks, timeout_s=600, slow_timeout_s=1800)


# --- the judgement ----------------------------------------------------------------------------------------------------


def test_ranks_that_get_on_are_not_judged():
    assert verdict_on(seen(0, still_s=601), seen(1, still_s=3)) is None


def test_rank_least_far_on_is_late():
    verdict = verdict_on(seen(0, still_s=601, count=23, phase="optimizer"), seen(1, still_s=650))
    assert verdict.ranks == [1]
    assert verdict.message == (
        "no rank has got on for 600 s: rank 1 is late, in the forward pass of step 5, at loss.py:3 (loss); "
        "the others wait for it in the update of step 5"
    )


def test_of_ranks_equally_far_on_those_outside_a_collective_are_late():
    beats = [beat(0, waiting=True), beat(1), beat(2, waiting=True)]
    assert [one.rank for one in late_ranks(beats)] == [1]
    assert [one.rank for one in late_ranks([beat(0, waiting=True), beat(1, waiting=True)])] == [0, 1]


@pytest.mark.parametrize("phase", ["starting", "saving", "exporting"])
def test_slow_phase_of_any_rank_has_the_long_limit(phase):
    assert verdict_on(seen(0, still_s=1700, phase=phase), seen(1, still_s=1700)) is None
    assert verdict_on(seen(0, still_s=1801, phase=phase), seen(1, still_s=1801)).kind == "late"


def test_ended_process_is_gone_unless_it_was_done():
    verdict = verdict_on(seen(0), seen(1, ended_s=2.5))
    assert verdict.message == (
        "rank 1 (pid 101 on h) ended without a word, last heard of in the forward pass of step 5, at loss.py:3 (loss)"
    )
    assert verdict_on(seen(0), seen(1, ended_s=2.5, phase="done")) is None
    assert verdict_on(seen(0), seen(1, ended_s=1.0)) is None


def test_rank_of_another_machine_is_silent_after_20_s_in_its_steps_and_saves_only():
    assert verdict_on(seen(0), seen(1, silent_s=19)) is None
    assert verdict_on(seen(0), seen(1, silent_s=25, phase="starting")) is None
    assert verdict_on(seen(0), seen(1, silent_s=25, phase="exporting")) is None
    assert verdict_on(seen(0), seen(1, silent_s=25, phase="saving")).kind == "silent"
    verdict = verdict_on(seen(0), seen(1, silent_s=25))
    assert (verdict.kind, verdict.ranks) == ("silent", [1])
    assert "rank 1 on h has been silent for 25 s, last heard of in the forward pass of step 5" in verdict.message


def test_living_process_that_cannot_post_is_not_silent():
    held = replace(seen(1, silent_s=25), alive_here=True)
    assert verdict_on(seen(0), held) is None


def test_observer_counts_by_its_own_clock_and_waits_for_all_ranks():
    observer = Observer(2, ended=lambda beat: None)
    observer.update([beat(0)], 10.0)
    assert observer.seen(11.0) == []
    observer.update([beat(1)], 12.0)
    observer.update([beat(0, serial=8), beat(1)], 15.0)
    assert [(one.silent_s, one.still_s) for one in observer.seen(20.0)] == [(5.0, 10.0), (8.0, 8.0)]
    observer.extend_deadlines(3.0)
    assert [(one.silent_s, one.still_s) for one in observer.seen(20.0)] == [(2.0, 7.0), (5.0, 5.0)]


def test_process_of_another_machine_is_not_judged_by_its_pid():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert process_ended(beat(0, machine=machine_id(), pid=ended.pid)) is True
    assert process_ended(beat(0, machine=machine_id(), pid=os.getpid())) is False
    assert process_ended(beat(0, machine="elsewhere", pid=ended.pid)) is None


# --- real ranks -------------------------------------------------------------------------------------------------------


def steps_with(dist: Dist, run_dir: str, what: str) -> str:
    """Ten steps that meet in a collective each; in the third of them rank 1 does `what`."""
    with watching(dist, Path(run_dir), timeout_s=TIMEOUT_S) as watchdog:
        for step in range(1, 11):
            dist.progress.enter("forward", step)
            if step == 3 and dist.rank == 1:
                misbehave(what, dist)
            try:
                torch.distributed.all_reduce(torch.ones(1))
            except RuntimeError:
                watchdog.await_verdict(HANG_S)
                time.sleep(FOREVER_S)  # the watchdog ends this process
        return "trained"


def misbehave(what: str, dist: Dist) -> None:
    if what == "hang":
        time.sleep(FOREVER_S)
    elif what == "exit":
        os._exit(0)
    elif what == "save":
        dist.progress.enter("saving")
        time.sleep(TIMEOUT_S + 2)


def outcome_of(run_dir: Path, what: str) -> tuple[dict, float]:
    """outcome.json of two ranks of which one misbehaves, and how long they took to end."""
    began = time.monotonic()
    with suppress(RuntimeError):
        run_ranks(steps_with, 2, str(run_dir), what)
    return json.loads((run_dir / "outcome.json").read_text()), time.monotonic() - began


def test_hanging_rank_is_named_with_its_stack_and_all_ranks_end(tmp_path):
    outcome, seconds = outcome_of(tmp_path, "hang")
    assert seconds < HANG_S / 2
    assert outcome["rank"] == 1
    assert "rank 1 is late, in the forward pass of step 3, at " in outcome["error"]
    assert "(misbehave)" in outcome["error"]
    stack = (tmp_path / "hang" / "rank_1.txt").read_text()
    assert "in misbehave" in stack
    assert "all_reduce" in (tmp_path / "hang" / "rank_0.txt").read_text()


def test_rank_that_exits_with_0_early_is_named(tmp_path):
    outcome, seconds = outcome_of(tmp_path, "exit")
    assert seconds < HANG_S / 2
    assert (outcome["state"], outcome["rank"]) == ("failed", 1)
    assert re.match(r"Error: rank 1 \(pid \d+ on .*\) ended without a word, last heard of ", outcome["error"])


def test_long_save_does_not_trip_the_watchdog(tmp_path):
    assert run_ranks(steps_with, 2, str(tmp_path), "save") == ["trained", "trained"]
    assert not (tmp_path / "outcome.json").exists()


def fail_one(dist: Dist, run_dir: str) -> None:
    """Rank 1 fails while rank 0 waits where no connection breaks: at a barrier that rank 1's process keeps open."""
    with watching(dist, Path(run_dir), timeout_s=FOREVER_S) as watchdog:
        if dist.rank == 1:
            watchdog.tell_failure("Error: a row is broken")
            time.sleep(FOREVER_S)
        barrier(dist)


def test_failure_of_one_rank_ends_the_others_with_its_words(tmp_path):
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 0 ended without a result"):
        run_ranks(fail_one, 2, str(tmp_path))
    assert time.monotonic() - began < HANG_S / 2
    outcome = json.loads((tmp_path / "outcome.json").read_text())
    assert (outcome["rank"], outcome["error"]) == (1, "Error: a row is broken")


def test_without_a_watchdog_a_collective_may_take_as_long_as_a_barrier():
    assert (comm_timeout_s(600), comm_timeout_s(0)) == (660, 1800)
