"""The table of a traced step on real GPUs: every class that must run is found, and the rows add up."""

import json
import subprocess
import sys

import pytest

from tests.support.ferry import REPO
from tests.support.limits import HANG_S

CONFIG = str(REPO / "configs" / "02_debug_sft_fsdp.py")
WORDS = ("train.steps=7", "optim.warmup_steps=2", "train.eval_every=0", "train.save_every=0", "run.export=false")
BATCH = ("train.global_batch_size=8", "train.micro_batch_size=2", "data.max_train_rows=400")


@pytest.mark.parametrize(
    ("backend", "gpus"),
    [
        pytest.param("pytorch", "[0]", id="pytorch"),
        pytest.param("ddp", "[0,1]", id="ddp", marks=pytest.mark.gpus(2)),
        pytest.param("fsdp", "[0,1]", id="fsdp", marks=pytest.mark.gpus(2)),
    ],
)
def test_table_of_a_traced_step_finds_what_a_step_is_made_of(backend, gpus, tmp_path):
    words = (f"target.gpu_ranks={gpus}", f"target.train_backend={backend}", "train.profile_steps=[6]")
    command = [sys.executable, str(REPO / "train.py"), CONFIG, *WORDS, *BATCH, *words, "--run-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, timeout=HANG_S)
    assert done.returncode == 0, (done.stdout + done.stderr).decode()[-4000:]
    assert "where step 6 of rank 0 went, on the device:" in done.stdout.decode()
    print("\n" + (tmp_path / "profile" / "step_000006_rank_0.txt").read_text())
    table = json.loads((tmp_path / "profile" / "step_000006_rank_0.json").read_text())
    calls = {share["name"]: share["calls"] for share in table["shares"]}
    wanted = {"products", "attention", "loss", "optimizer", "copies", "elementwise and the rest"}
    wanted |= {"communication, exposed"} if backend != "pytorch" else set()
    assert {name for name in wanted if not calls[name]} == set()
    assert sum(share["ms"] for share in table["shares"]) == pytest.approx(table["span_ms"])
    if table["ceiling"] is not None:
        assert 0 < table["ceiling"]["products_tflops"] < 1.2 * table["ceiling"]["sustained_tflops"]
