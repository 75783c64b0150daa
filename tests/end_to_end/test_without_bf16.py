"""As on a CPU without bf16, on any CPU: oneDNN is told not to use what it might find."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from tests.support.ferry import REPO
from tests.support.limits import HANG_S

WITHOUT = {"ONEDNN_MAX_CPU_ISA": "AVX2"}
NO_BF16 = r"(this CPU has no bf16 in hardware|bf16 products take \d+ x as long as fp32 here)"


def test_tests_of_precision_pass():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/trainer/train/test_precision.py"]
    done = subprocess.run(
        command, cwd=REPO, env={**os.environ, **WITHOUT}, capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


@pytest.mark.parametrize(
    ("precision", "told"),
    [("auto", f"precision: fp32, {NO_BF16}"), ("bf16", f"warning: train.precision is bf16, and {NO_BF16}")],
    ids=["auto", "bf16"],
)
def test_main_job_trains_exports_and_says_its_precision(ferry, precision, told):
    """With bf16 by name too: slow, and right."""
    words = ("target.device=cpu", "target.gpu_ranks=[0,1]", "train.steps=6", "train.eval_every=3", "train.save_every=6")
    (setting,) = (f"{name}={value}" for name, value in WITHOUT.items())
    more = (f"train.precision={precision}", "--env", setting, "--python", sys.executable)
    done = ferry.run(str(REPO / "configs" / "02_debug_sft_fsdp.py"), *words, *more, *ferry.where())
    assert done.returncode == 0, done.stderr.decode()
    (results,) = (ferry.project / "results").iterdir()
    log = (results / "logs" / "attempt_1" / "rank_0.log").read_text()
    assert re.search(told, log), log
    rows = map(json.loads, (results / "metrics.jsonl").read_text().splitlines())
    held_out = [row["eval_loss"] for row in rows if "eval_loss" in row]
    assert held_out[-1] < held_out[0]
    assert json.loads((results / "outcome.json").read_text())["compared"]["predicted"]
