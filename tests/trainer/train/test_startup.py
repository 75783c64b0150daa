"""The account of the seconds until the first step."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainer.schema import STARTED_ENV
from trainer.startup import Startup, now_s, process_start_s, summarize


def test_phases_share_the_time_and_one_that_comes_again_adds_up():
    report = summarize(
        [("launcher", 10.0), ("imports", 12.0), ("data", 13.0), ("imports", 13.5), ("first step", 14.0)], ended_s=20.0
    )
    assert report.seconds == {"launcher": 2.0, "imports": 1.5, "data": 0.5, "first step": 6.0}
    assert report.total_s == 10.0
    assert (
        report.render() == "first step after 10.0 s: 2.0 launcher, 1.5 imports, 0.5 tokenizer and data, 6.0 first step"
    )


def test_a_phase_too_short_to_matter_is_not_told():
    report = summarize([("ranks", 1.0), ("data", 1.01), ("first step", 3.0)], ended_s=4.0)
    assert report.render() == "first step after 3.0 s: 2.0 tokenizer and data, 1.0 first step"


def test_startup_is_told_at_the_first_step_only():
    times = iter([3.0, 7.0])
    startup = Startup(2.0, clock=lambda: next(times))
    startup.enter("first step")
    report = startup.finish()
    assert report is not None
    assert report.seconds == {"command": 1.0, "first step": 4.0}
    startup.enter("data")
    assert (startup.finish(), startup.report) == (None, report)


def test_phase_that_lasts_is_told_while_it_lasts():
    now, told = [100.0], []
    startup = Startup(100.0, clock=lambda: now[0])
    startup.enter("imports")
    startup.watch(told.append, every_s=0.001)
    for phase, at_s in (
        ("imports", 104.9),
        ("imports", 105.2),
        ("imports", 114.0),
        ("imports", 116.0),
        ("weights", 130.0),
    ):
        if phase == "weights":
            startup.enter("weights")  # at 116
        now[0] = at_s
        time.sleep(0.2)
    startup.finish()
    now[0] = 900.0
    time.sleep(0.1)
    assert told == ["starting, 5 s: imports", "starting, 16 s: imports", "starting, 14 s: weights"]


def test_startup_without_a_beginning_notes_nothing():
    startup = Startup()
    startup.enter("data")
    assert (startup.finish(), startup.report) == (None, None)


def test_process_start_equals_what_ps_says():
    """`ps -o etimes` counts whole seconds since the process began."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        time.sleep(1.2)  # of a process that is younger than its rounding, ps says some 130 years
        started = process_start_s(now_s(), stat=Path(f"/proc/{child.pid}/stat"))
        before_s = now_s() - started
        told = subprocess.run(["ps", "-o", "etimes=", "-p", str(child.pid)], capture_output=True, text=True)
        assert before_s - 1.1 <= float(told.stdout) <= now_s() - started + 1.1
    finally:
        child.communicate(b"\n")


@pytest.mark.parametrize("text", ["", "1 (a b) S", f"1 (x) {' 0' * 30}"])
def test_process_start_is_now_where_the_system_does_not_say(tmp_path, text):
    (tmp_path / "stat").write_text(text)
    assert process_start_s(100.0, stat=tmp_path / "stat") == 100.0


@pytest.mark.parametrize(("word", "counts"), [(-2.0, True), (-7200.0, False), (5.0, False)])
def test_launcher_counts_unless_its_word_is_that_of_another_start(word, counts):
    environ = {STARTED_ENV: f"{process_start_s(now_s()) + word:.2f}"}
    startup = Startup.of_process(environ)
    assert STARTED_ENV not in environ
    report = startup.finish()
    assert report is not None
    assert ("launcher" in report.seconds) == counts


def test_words_that_are_no_number_are_no_launchers():
    report = Startup.of_process({STARTED_ENV: "yesterday"}).finish()
    assert report is not None
    assert list(report.seconds) == ["command"]
