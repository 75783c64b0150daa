"""An asynchronous save of a 1.5B model on one and two GPUs: how long training stands still, and what is saved."""

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.ferry import REPO


@pytest.mark.parametrize("gpus", [1, 2])
def test_save_of_a_1_5b_model_blocks_training_less_than_a_second_and_holds_the_old_values(gpus: int, tmp_path: Path):
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPU(s)")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]
    command = [*launch, "-m", "tests.gpu.async_save", str(tmp_path / "checkpoints")]
    done = subprocess.run(command, capture_output=True, timeout=500, cwd=REPO)
    assert done.returncode == 0, (done.stdout + done.stderr).decode()[-4000:]
    result = json.loads(next(line for line in done.stdout.decode().splitlines() if line.startswith("{")))
    print(f"{gpus} x {result['card']}")
    for name, value in result.items():
        if isinstance(value, list) and value:
            value = f"{len(value)} steps, median {statistics.median(value):.3f} s, slowest {max(value):.3f} s"
        print(f"  {name}: {value}")
    assert result["synchronous"] is None
    assert result["first_blocked_s"] < 1.0
    assert result["second_blocked_s"] < 1.0
    assert result["first_holds_the_old_value"]
    assert result["second_holds_the_old_value"]
