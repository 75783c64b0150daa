"""`train.py CONFIG --calibrate`: sizes are timed, the verdict can be pasted, and the global batch stays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml
from click.testing import CliRunner, Result

from tests.support.ferry import REPO
from tests.support.limits import HANG_S
from trainer.calibration.sizes import Calibration, Timed, first_size, search, sizes, why_enough, with_rows
from trainer.commands import cli
from trainer.config.load import config_from_dict, load_config
from trainer.start.launch import build_torchrun_argv

SMALL = {
    "target": {"device": "cpu"},
    "model": {"hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1},
    "data": {"seq_len": 32},
}


def timed(rows: int, speed: float) -> Timed:
    return Timed(rows, "activation_checkpointing=none", 10.0, 1, speed, None, None)


def calibration(*speeds: float, **changes: Any) -> Calibration:
    found = tuple(timed(2**i, speed) for i, speed in enumerate(speeds))
    values = {"configured": 1, "global_batch": None, "by_accumulation": False, "by_tokens": False, "seq_len": 512}
    return Calibration(found, "1 s has gone by", **(values | changes))


# --- which sizes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("train", "first", "rows"),
    [
        ({"global_batch_size": 16}, 1, [1, 2, 4, 8]),
        ({"global_batch_size": 13}, 2, [2, 4]),
        ({"micro_batch_size": 3, "grad_accum_steps": 2}, 1, [1, 2, 4]),
        ({"global_batch_size": 4}, 8, [2]),
    ],
)
def test_sizes_are_doubled_as_far_as_a_step_has_rows_for_each_of_two_ranks(train, first, rows):
    config = config_from_dict({"target": {"gpu_ranks": [0, 1]}, "train": train})
    assert list(sizes(config, 2, first=first)) == rows


def test_sizes_have_no_end_where_the_batch_may_grow():
    assert [rows for rows, _ in zip(sizes(config_from_dict({}), 2, first=1), range(4), strict=False)] == [1, 2, 4, 8]


@pytest.mark.parametrize(
    ("speeds", "seconds", "reason"),
    [
        ([], 5, None),
        ([100, 120], 5, None),
        ([100, 99], 5, None),
        ([100, 90], 5, "2 rows are slower than 1"),
        ([100], 101, "101 s have gone by"),
    ],
)
def test_larger_sizes_are_left_when_they_are_slower_or_time_is_over(speeds, seconds, reason):
    assert why_enough(list(calibration(*speeds).timed), seconds) == reason


def test_another_size_keeps_the_rows_of_a_step():
    given = config_from_dict({"train": {"micro_batch_size": 2, "grad_accum_steps": 8}})
    changed = with_rows(given, 4, 2).train
    assert (changed.micro_batch_size, changed.global_batch_size, changed.grad_accum_steps) == (4, 32, None)
    alone = with_rows(config_from_dict({}), 4, 2).train
    assert (alone.micro_batch_size, alone.global_batch_size) == (4, None)


@dataclass
class FakeTrial:
    """Sizes with known speeds, of which those above `largest` are said not to fit."""

    speeds: dict[int, float]
    largest: int = 2**20

    def why_too_large(self, rows: int) -> str | None:
        return f"{rows} rows do not fit" if rows > self.largest else None

    def time(self, rows: int) -> Timed | str:
        return timed(rows, self.speeds[rows]) if rows in self.speeds else f"{rows} rows are out of memory"


@pytest.mark.parametrize(
    ("trial", "seconds", "found", "reason"),
    [
        (FakeTrial({1: 100, 2: 150, 4: 160}), 5, [1, 2, 4], "8 rows are out of memory"),
        (FakeTrial({1: 100, 2: 150, 4: 160}, largest=2), 5, [1, 2], "4 rows do not fit"),
        (FakeTrial({1: 100, 2: 90, 4: 160}), 5, [1, 2], "2 rows are slower than 1"),
        (FakeTrial({1: 100, 2: 150, 4: 160, 8: 170}), 5, [1, 2, 4, 8], "a rank has no more rows in a step"),
        (FakeTrial({1: 100}, largest=0), 5, [], "1 rows do not fit"),
        (FakeTrial({1: 100}), 101, [], "101 s have gone by"),
    ],
    ids=["out of memory", "too large", "slower", "no more rows", "not even the first", "no time"],
)
def test_sizes_are_tried_until_there_is_a_reason_to_end(trial, seconds, found, reason):
    told: list[Timed] = []
    kept, ended = search([1, 2, 4, 8], trial, seconds=lambda: seconds, tell=told.append)
    assert ([one.rows for one in kept], ended) == (found, reason)
    assert told == kept


def test_first_size_fills_a_gpu_as_far_as_it_fits():
    large = FakeTrial({}, largest=2).why_too_large
    assert first_size(1024, FakeTrial({}).why_too_large, on_gpu=True) == 4
    assert first_size(1024, large, on_gpu=True) == 2
    assert first_size(8192, large, on_gpu=True) == 1
    assert first_size(32, large, on_gpu=False) == 1


# --- the verdict ------------------------------------------------------------------------------------------------------


def test_best_size_is_told_against_the_configured_one_with_what_to_paste():
    told = calibration(100, 150, 149, global_batch=32, by_accumulation=True).render()
    assert told[1:] == [
        "fastest: 2 rows, 1.50 x of the configured 1",
        "train.micro_batch_size=2 train.global_batch_size=32 train.grad_accum_steps=null",
    ]


def test_overrides_give_a_config_with_the_best_size_and_the_same_batch(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({"train": {"micro_batch_size": 1, "grad_accum_steps": 32}}))
    found = calibration(100, 150, global_batch=32, by_accumulation=True)
    changed = load_config(str(file), found.overrides).train
    assert (changed.micro_batch_size, changed.global_batch_size) == (2, 32)


@pytest.mark.parametrize(("speeds", "told"), [((100, 150), True), ((150, 100), False)])
def test_a_size_that_changes_the_step_is_told_as_such(speeds, told):
    words = "note: a step is then of 2 instead of 1 rows a micro-batch: train.global_batch_size keeps it as it is"
    assert any(line.startswith(words) for line in calibration(*speeds).render()) is told
    assert not any("note" in line for line in calibration(*speeds, global_batch=32).render())


def test_micro_batch_that_is_counted_in_tokens_stays_so():
    assert calibration(100, 150, by_tokens=True).overrides == ["train.micro_batch_tokens=1024"]


def test_nothing_timed_is_said_with_the_reason():
    assert calibration().render() == ["no size was timed: 1 s has gone by"]
    assert calibration().overrides == []


def test_line_of_a_size_has_its_plan_and_figures():
    line = replace(timed(8, 74300.0), mfu=0.262, peak_gib=9.08).render()
    assert line.split() == ["8", "none", "10.0", "74,300", "26.2%", "9.1"]


# --- for real ---------------------------------------------------------------------------------------------------------


def call(folder: Path, *options: str, **sections: Any) -> Result:
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump({**SMALL, **sections}))
    with patch.dict(os.environ):  # which a start changes
        return CliRunner().invoke(cli.train_command, [str(file), *options])


def test_sizes_are_timed_here_without_run_folder_and_data(tmp_path):
    data = {"seq_len": 32, "train": ["builtin:stdlib-docs"]}
    result = call(tmp_path, "--calibrate", "--json", train={"global_batch_size": 2}, data=data, run={"dir": "here"})
    found = json.loads(result.stdout)
    assert found["timed"][0]["rows"] == 1
    assert all(one["tokens_per_s_per_gpu"] > 0 for one in found["timed"])
    assert found["overrides"][1:] == ["train.global_batch_size=2"]
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


@pytest.mark.parametrize(
    ("ranks", "send"),
    [([0], os.kill), ([0, 1], os.killpg), ([0, 1], os.kill)],
    ids=["one process", "two ranks, by a terminal", "two ranks, the launcher alone"],
)
def test_ctrl_c_ends_with_130_and_one_line_of_what_was_not_done(tmp_path, ranks, send):
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({**SMALL, "target": {"device": "cpu", "gpu_ranks": ranks}}))
    command = [sys.executable, str(REPO / "train.py"), str(file), "--calibrate"]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, start_new_session=True, **pipes) as process:
        said = [process.stdout.readline() for _ in range(3)]
        assert [line.split()[0] for line in said] == ["precision:", "learning", "rows"]
        send(process.pid, signal.SIGINT)
        told = process.communicate(timeout=HANG_S)[1]  # to its end, which comes when the last rank is gone
    assert (process.returncode, told) == (130, "interrupted before the verdict; nothing was trained\n")


@pytest.mark.parametrize("option", ["--inspect", "--calibrate"])
def test_run_folder_of_what_is_no_run_is_refused(tmp_path, option):
    result = call(tmp_path, option, "--run-dir", str(tmp_path / "run"))
    assert result.exit_code == 2
    assert "Error: --run-dir belongs to a run: --inspect and --calibrate have no run folder" in result.stderr
    assert not (tmp_path / "run").exists()


def test_json_without_anything_to_show_is_refused(tmp_path):
    result = call(tmp_path, "--json")
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (
        2,
        "Error: --json belongs to --inspect or --calibrate",
    )


def test_ranks_are_started_with_the_same_options():
    argv = build_torchrun_argv(sys.executable, "train.py", Path("c"), processes=2, debug=False, options=["--calibrate"])
    assert argv[-3:] == ["train.py", "c", "--calibrate"]
