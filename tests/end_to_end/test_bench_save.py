"""bench/save.py: what it makes of the steps beside a save, and a short run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ferry import REPO
from tests.support.jobs import wait_for
from tests.support.limits import HANG_S
from tests.support.stubborn import running

sys.path.insert(0, str(REPO / "bench"))

from save import BEFORE, has_ended, split_steps, table, why_none

SAVED = "saved /a/checkpoints/step_000004 (the training waited 0.25 s, written in 2.10 s)\n"


def test_steps_are_those_before_during_and_after_a_save():
    parts = split_steps([9.0, 1.0, 1.0, 1.0, 1.75, 1.0, 1.0, 1.0], 4, written_s=2.10)
    assert parts == {"before": [1.0] * 3, "during": [1.75, 1.0], "after": [1.0, 1.0]}


def test_only_the_last_steps_before_the_save_are_usual_ones():
    steps = [5.0] * 400 + [1.0] * BEFORE + [2.0] * 50
    parts = split_steps(steps, 400 + BEFORE, written_s=1000.0)
    assert (set(parts["before"]), parts["during"], parts["after"]) == ({1.0}, [2.0] * 50, [])


def test_table_gives_mean_and_slowest_by_those_before():
    lines = table({"before": [0.1, 0.1], "during": [0.15, 0.11], "after": []})
    assert lines[2:] == [
        "| before | 2 | 100.0 | 100.0 | 1.000 x | 1.00 x |",
        "| during | 2 | 130.0 | 150.0 | 1.300 x | 1.50 x |",
        "ms of the first steps from the save on: 150 110",
        "The save ended so soon that this says little: a larger model says more.",
    ]
    assert "little" not in table({"before": [0.1], "during": [0.1] * 10, "after": []})[-1]


@pytest.mark.parametrize(
    ("steps", "log", "expected"),
    [(132, SAVED, True), (130, SAVED, False), (132, "", False), (199, "", False), (200, "", True)],
)
def test_run_is_ended_some_steps_after_the_save_or_when_the_next_would_wait(steps, log, expected):
    metrics = "".join(json.dumps({"step": step, "step_s": 0.1}) + "\n" for step in range(1, steps + 1))
    assert has_ended(metrics, log, save_every=100) is expected


@pytest.mark.parametrize(
    ("steps", "log", "expected"),
    [
        (7, "Error: no memory\nbye\n", "the run ended after 7 steps, before its save had: Error: no memory"),
        (200, "step 200\n", "no save has ended before step 200 (raise --save-every): step 200"),
        (200, f"note: saves stop the training: no room\n{SAVED}", "not beside the training: note: saves stop"),
    ],
)
def test_run_without_a_save_beside_the_training_says_why(steps, log, expected):
    metrics = "".join(json.dumps({"step": step, "step_s": 0.1}) + "\n" for step in range(1, steps + 1))
    assert expected in why_none(metrics, log, save_every=100)


@pytest.mark.parametrize("save_every", ["0", "1", "501"])
def test_save_without_steps_before_it_or_beyond_the_run_is_refused(save_every: str):
    command = [sys.executable, str(REPO / "bench" / "save.py"), "--model", "tiny", "--save-every", save_every]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 2
    assert f"--save-every: 2 to 500, not {save_every}" in done.stderr


@pytest.mark.parametrize(
    ("setting", "expected"),
    [("fsdp", "fsdp: not KEY=VALUE"), ("train.save_every=9", "train.save_every: said by --save-every")],
)
def test_setting_that_is_none_or_that_an_option_says_is_refused(setting: str, expected: str):
    command = [sys.executable, str(REPO / "bench" / "save.py"), "--model", "tiny", setting]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 2
    assert expected in done.stderr


@pytest.mark.parametrize("key", ["train.async_save", "train.log_every", "train.steps"])
def test_setting_that_the_figures_rest_on_is_refused(key: str):
    command = [sys.executable, str(REPO / "bench" / "save.py"), "--model", "tiny", "--save-every", "30"]
    command += ["--device", "cpu", "--limit-s", "1", f"{key}=0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 2
    assert f"{key}: one save is measured" in done.stderr


def test_tiny_run_of_ours_is_measured(tmp_path: Path):
    command = [sys.executable, str(REPO / "bench" / "save.py"), "--model", "tiny", "--seq-len", "64"]
    options = ["--micro-batch", "2", "--save-every", "30", "--device", "cpu", "--out", str(tmp_path / "save.json")]
    options += ["optim.learning_rate=0.001"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    assert "ours tiny 1x2x64 fixed optim.learning_rate=0.001: blocked" in done.stdout
    (row,) = json.loads((tmp_path / "save.json").read_text())["rows"]
    assert len(row["before"]) == 29 and row["during"] and row["after"]


def test_without_a_gpu_nothing_is_measured_unasked():
    command = [sys.executable, str(REPO / "bench" / "save.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, env={**os.environ, "PATH": ""})
    assert done.returncode == 1
    assert "no GPU is seen here" in done.stderr and "--device cpu" in done.stderr


def test_terminated_measurement_leaves_neither_processes_nor_files(tmp_path: Path):
    command = [sys.executable, str(REPO / "bench" / "save.py"), "--model", "tiny", "--device", "cpu"]
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ) as measuring:
        wait_for(lambda: running(str(tmp_path)))
        measuring.terminate()
        assert measuring.wait(timeout=HANG_S) == 143
    assert running(str(tmp_path)) == []
    assert list(tmp_path.iterdir()) == []
