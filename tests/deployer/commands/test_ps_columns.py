"""The table of `ps`: the order of its rows, what a row says, and what gives way on a narrow terminal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deployer.agent.host.layout import Job
from deployer.agent.job.progress import Recent, recent
from deployer.agent.job.status import FAILED, LOST, PREPARING, QUEUED, RUNNING, STOPPED, SUCCEEDED
from deployer.agent.job.views import Row
from deployer.commands.rows import columns_of, duration, in_order, seconds_left, style_of
from deployer.jobs.registry import SeenJob, stamp

RUN = Row(
    "debug-sft-fsdp-1130-0952-5947",
    RUNNING,
    name="debug-sft-fsdp",
    created="2026-11-30T09:52:00Z",
    gpus=("0", "1", "2", "3"),
    step=120,
    steps=2000,
    loss=1.23456,
    step_s=0.5,
    ran_s=61.2,
    age_s=100,
)


def seen(row: Row, **more: str) -> SeenJob:
    return SeenJob(row, "root@10.0.0.1:22022", **{"seen_at": stamp(), **more})


def table(row: Row, room: int | None) -> dict[str, str]:
    titles, (texts,) = columns_of([seen(row)], room)
    if room is not None:
        assert sum(map(len, texts)) + 2 * (len(texts) - 1) <= max(room, len(row.id) + 20)
    return dict(zip(titles, texts, strict=True))


def test_row_says_what_runs_how_far_it_is_and_how_long_it_takes() -> None:
    titles, (texts,) = columns_of([seen(RUN)], None)
    assert titles == ["ID", "STATE", "COMMAND", "GPUS", "STEP", "LOSS", "ELAPSED", "ETA", "WHERE"]
    assert texts[:6] == (RUN.id, "running", "debug-sft-fsdp", "0,1,2,3", "120/2000", "1.235")
    assert texts[6].startswith("1m0") and texts[7:] == ("15m40s", "root@10.0.0.1:22022")
    program = Row("p", RUNNING, command="python my_train.py --learning-rate 1e-5 --epochs 3")
    words = table(program, None)
    assert words.pop("COMMAND") == "python my_train.py --learning-rate 1e-5…"
    assert {words[name] for name in ("GPUS", "STEP", "LOSS", "ETA")} == {"-"}


def test_narrow_terminal_drops_the_least_important_columns_first() -> None:
    assert list(table(RUN, 116))[2:4] == ["COMMAND", "GPUS"] and "…" in table(RUN, 116)["COMMAND"]
    assert list(table(RUN, 80)) == ["ID", "STATE", "STEP", "LOSS", "ELAPSED", "ETA"]
    assert list(table(RUN, 40)) == ["ID", "STATE"]
    silent = RUN._replace(loss=None, step_s=None)  # of what is dropped, first the columns without a word
    assert list(table(silent, 80)) == ["ID", "STATE", "STEP", "ELAPSED", "WHERE"]


def test_running_jobs_stand_on_top_and_ended_ones_below_the_newest_first() -> None:
    states = [SUCCEEDED, RUNNING, QUEUED, FAILED, RUNNING, PREPARING]
    rows = [seen(Row(f"j{n}", state, created=f"2026-11-{n + 10}T00:00:00Z")) for n, state in enumerate(states)]
    assert [row.job.id for row in in_order(rows)] == ["j4", "j1", "j5", "j2", "j3", "j0"]
    assert [style_of(rows[n]) for n in (1, 3)] == ["green", "red"]
    assert style_of(rows[1]._replace(trouble="gone")) not in (style_of(rows[1]), style_of(rows[3]))
    assert all(style_of(seen(Row("j", state))) for state in (STOPPED, LOST))


@pytest.mark.parametrize(
    ("row", "left_s"),
    [
        (RUN, 940),
        (RUN._replace(step=2000), 0),
        (RUN._replace(state=SUCCEEDED), None),
        (RUN._replace(step_s=None), None),
        (RUN._replace(steps=None), None),
        (RUN._replace(step=3000), None),
    ],
)
def test_time_left_is_told_of_what_runs_alone(row: Row, left_s: float | None) -> None:
    assert seconds_left(row) == left_s


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0s"), (59.6, "1m00s"), (3599, "59m59s"), (3661, "1h01m"), (90000, "1d01h")]
)
def test_duration_for_the_eye(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_metrics_of_any_program_are_read_as_far_as_they_are_numbers(tmp_path: Path) -> None:
    job = Job(str(tmp_path))
    assert recent(job) == Recent()
    first = {"step": 1, "steps": 9, "loss": 4.0, "step_s": 60.0, "start_s": 70.0}
    later = [{"step": n, "steps": 9, "loss": 4.0 - n, "step_s": n / 10} for n in (2, 3)]
    lines = [json.dumps(line) for line in (first, *later, {"step": 3, "eval_loss": 9.0})]
    Path(job.metrics).write_text("\n".join(lines) + '\n{"step": 4')
    assert recent(job) == Recent(3, 9, 1.0, 0.25), "the first step holds the warm-up"
    Path(job.metrics).write_text('{"step": 7, "steps": -1, "loss": NaN, "step_s": "fast"}\n')
    assert recent(job) == Recent(7)
    Path(job.metrics).write_text('[1]\n{"step": true, "loss": 1e999}\n')
    assert recent(job) == Recent()
    Path(job.metrics).write_text("".join(f'{{"step": {n}, "loss": 1.0, "note": "{"x" * 90}"}}\n' for n in range(999)))
    assert recent(job).step == 998
