"""Samples on a GPU, with compiled blocks and CUDA graphs: the losses are those of a run without them, bit for bit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ferry import REPO
from tests.support.limits import HANG_S

SMALL = ("model.hidden_size=256", "model.intermediate_size=768", "model.num_layers=4", "model.num_heads=4")
RUN = ("train.steps=30", "train.eval_every=10", "train.save_every=0", "train.deterministic=true", "train.log_every=1")
SAMPLES = ('run.sample_prompts=["What does len do?", "def f("]', "run.sample_tokens=48")
WAYS = {
    "compiled": (),
    "plain": ("parallel.compile=false",),
    "fsdp": ("target.train_backend=fsdp",),
    "lora": ("lora.rank=8",),
}


def trained(folder: Path, *words: str) -> tuple[list[float], str]:
    """The losses of a run, and what it said."""
    command = [
        sys.executable,
        str(REPO / "train.py"),
        str(REPO / "configs" / "01_debug_sft.py"),
        "--run-dir",
        str(folder),
    ]
    done = subprocess.run([*command, *SMALL, *RUN, *words], capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row.get("loss", row.get("eval_loss")) for row in rows], done.stdout


@pytest.mark.parametrize("way", WAYS)
def test_losses_with_samples_are_those_without(tmp_path, way):
    without, _ = trained(tmp_path / "without", *WAYS[way])
    with_them, said = trained(tmp_path / "with", *WAYS[way], *SAMPLES)
    print(*(line for line in said.splitlines() if "sample" in line or "compil" in line), sep="\n")
    assert with_them == without and len(without) > 30
    samples = [json.loads(line) for line in (tmp_path / "with" / "samples.jsonl").read_text().splitlines()]
    assert len(samples) >= 8 and all(sample["text"] for sample in samples if sample["step"])
