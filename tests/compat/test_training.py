"""A run of the trainer of 836d9e4 that loses its supervisor, is stopped and goes on, all by the present client."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.compat.record import TINY, TRAINING_ROWS
from tests.compat.versions import (
    HANG_S,
    Versions,
    done,
    is_agent_of,
    is_supervised_by,
    kill_supervisor,
    listed,
    reached,
    record,
    supervisor,
    told,
)
from tests.support.ferry import REPO
from tests.support.jobs import wait_for

pytestmark = pytest.mark.timeout(900)


def metrics(job: Path) -> list[dict[str, Any]]:
    """The steps that were made."""
    path = job / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [row for row in rows if "loss" in row]


def test_run_that_lost_its_supervisor_is_stopped_saves_and_goes_on_where_it_was(both: Versions, old_code: Path) -> None:
    both.write("tiny.py", TINY)
    both.write("rows.jsonl", TRAINING_ROWS)
    far = ("train.steps=1000000", "train.eval_every=1000000", "train.save_every=1000000", "run.export=false")
    far += ("train.nonfinite=abort",)  # which the present schema has no longer, and the job's trainer has
    words = ("tiny.py", *far, *both.old.where(), "--python", sys.executable, "--detach", "--json")
    job = Path(json.loads(done(both.old.run("run", *words)))["folder"])
    wait_for(lambda: len(metrics(job)) >= 3, timeout_s=HANG_S)

    former = kill_supervisor(job)
    row = listed(both.new, job)
    assert (row["state"], row["kind"]) == ("running", "trainer") and row["step"] >= 3
    wait_for(lambda: supervisor(job) != former, timeout_s=HANG_S)
    assert is_supervised_by(REPO, job)
    (answer,) = json.loads(done(both.new.run("stop", job.name, "--json", timeout_s=HANG_S)))
    assert (answer["state"], answer["was"], answer["remaining"]) == ("stopped", "running", [])
    saved = told(both.new, job)["attempts"][0]["step"]
    assert saved == len(metrics(job))
    assert (job / "checkpoints" / f"step_{saved:06d}" / "COMPLETE").exists()
    done(both.new.run("pull", job.name, "--checkpoint", "latest"))
    home = both.new.project / "results" / job.name
    assert (home / "checkpoints" / f"step_{saved:06d}" / "COMPLETE").exists()

    before = record(job)["plan"]
    resumed = both.new.run("resume", job.name, f"train.steps={saved + 2}", timeout_s=HANG_S)
    assert f"attempt 2, from step {saved}\n" in resumed.stderr.decode()
    assert f"step {saved + 2}/{saved + 2}" in done(resumed)
    found = told(both.new, job)
    assert (found["state"], found["attempt"], found["resumed_from"]) == ("succeeded", 2, saved)
    assert is_agent_of(REPO, Path(found["slots"]["agent"]))
    assert [row["step"] for row in metrics(job)] == list(range(1, saved + 3))
    assert (job / "lib" / "trainer" / "loop.py").read_bytes() == (old_code / "trainer" / "loop.py").read_bytes()
    then, now = (plan["config_yaml"] for plan in (before, record(job)["plan"]))
    assert now == then.replace("steps: 1000000\n", f"steps: {saved + 2}\n", 1) and "nonfinite: abort\n" in now
    texts = [(job / name).read_text() for name in ("config.attempt_1.yaml", "config.yaml")]
    assert texts == [then, now]  # also as the job's trainer has written them anew
    reached(job, "succeeded")
