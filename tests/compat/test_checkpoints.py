"""Checkpoints between the trainer of 836d9e4 and the present one: each goes on from what the other has saved."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.compat.record import TINY, TRAINING_ROWS
from tests.support.ferry import REPO
from tests.support.limits import HANG_S


def train(code: Path, folder: Path, steps: int) -> str:
    """What a start by that code, of so many steps at the most, says."""
    words = ["tiny.py", "--run-dir", "run", "run.export=false", "train.steps=6", f"train.stop_after_steps={steps}"]
    done = subprocess.run(
        [sys.executable, str(code / "train.py"), *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(code), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_run_goes_on_from_a_checkpoint_of_the_older_trainer_and_back(tmp_path: Path, old_code: Path) -> None:
    (tmp_path / "tiny.py").write_text(TINY)
    (tmp_path / "rows.jsonl").write_text(TRAINING_ROWS)
    train(old_code, tmp_path, 2)
    assert (tmp_path / "run/checkpoints/step_000002/COMPLETE").read_bytes() == b""
    told = train(REPO, tmp_path, 2)
    assert told.count("note: step_000002 is of an earlier version, which kept no checksum of state.json") == 1
    assert "step 3/6" in told and "step 4/6" in told
    assert "state.json" in (tmp_path / "run/checkpoints/step_000004/COMPLETE").read_text()
    told = train(old_code, tmp_path, 2)
    assert "resuming after step 4" in told and "step 6/6" in told and "step 4/6" not in told
