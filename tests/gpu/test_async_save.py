"""An asynchronous save of a 1.5B model on one and two GPUs: how long training stands still, and what is saved."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ferry import REPO
from tests.support.limits import HANG_S


@pytest.mark.parametrize("gpus", [pytest.param(n, marks=pytest.mark.gpus(n)) for n in (1, 2)])
def test_save_of_a_1_5b_model_blocks_training_less_than_a_second_and_holds_the_old_values(gpus: int, tmp_path: Path):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]
    command = [*launch, "-m", "tests.gpu.async_save", str(tmp_path / "checkpoints")]
    done = subprocess.run(command, capture_output=True, timeout=HANG_S, cwd=REPO)
    assert done.returncode == 0, (done.stdout + done.stderr).decode()[-4000:]
    result = json.loads(next(line for line in done.stdout.decode().splitlines() if line.startswith("{")))
    print(f"{gpus} x {result['card']}")
    for name, value in result.pop("summary").items():
        print(f"  {name}: {', '.join(f'{key} {number:.3f}' for key, number in value.items())}")
    for name, value in result.items():
        if not isinstance(value, list):
            print(f"  {name}: {value}")
    assert result["synchronous"] is None
    for save in ("first", "second", "third"):
        assert result[f"{save}_blocked_s"] < 1.0
        assert result[f"{save}_holds_the_old_value"]
        assert result[f"{save}_note"] == ""
