"""Options of FSDP whose effect only a GPU shows: where things live, and how much is held. One GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ferry import REPO
from tests.support.limits import HANG_S

CONFIG = str(REPO / "configs" / "02_debug_sft_fsdp.py")
WORDS = (
    "target.gpu_ranks=[0]",
    "target.train_backend=fsdp",
    "train.steps=6",
    "optim.warmup_steps=0",
    "train.eval_every=0",
    "data.max_train_rows=400",
)
LARGER = ("model.hidden_size=512", "model.intermediate_size=1536", "model.num_layers=8", "train.micro_batch_size=16")


def trained(folder: Path, *words: str) -> list[dict[str, float]]:
    """The steps' records of a run."""
    command = [sys.executable, str(REPO / "train.py"), CONFIG, *WORDS, *words, "--run-dir", str(folder)]
    done = subprocess.run(command, capture_output=True, timeout=HANG_S)
    assert done.returncode == 0, (done.stdout + done.stderr).decode()[-4000:]
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if "loss" in row]


def test_offloaded_parameters_give_the_same_losses_resume_and_export(tmp_path):
    words = ("train.save_every=3", "train.precision=fp32")
    want = trained(tmp_path / "there", *words, "run.export=false")
    trained(tmp_path / "here", *words, "parallel.cpu_offload=true", "train.stop_after_steps=3")
    got = trained(tmp_path / "here", *words, "parallel.cpu_offload=true", "parallel.ignored_modules=['*.q_norm']")
    losses, expected = ([row["loss"] for row in rows] for rows in (got, want))
    print(f"losses {losses} with offload, {expected} without")
    assert losses == pytest.approx(expected, abs=1e-3)
    assert (tmp_path / "here" / "export" / "model.safetensors").exists()


def test_offload_and_recomputation_hold_less_on_the_card(tmp_path):
    def peak(name: str, *words: str) -> float:
        return max(row["mem_gib"] for row in trained(tmp_path / name, *LARGER, "run.export=false", *words))

    none = peak("none")
    selective = peak("selective", "parallel.activation_checkpointing=selective")
    full = peak("full", "parallel.activation_checkpointing=full")
    half = peak("half", "parallel.activation_checkpointing=full", "parallel.checkpoint_every=2")
    offloaded = peak("offloaded", "parallel.activation_checkpointing=full", "parallel.cpu_offload=true")
    print(f"GiB: none {none}, selective {selective}, half {half}, full {full}, offloaded {offloaded}")
    assert none > selective > full > offloaded
    assert none > half > full
