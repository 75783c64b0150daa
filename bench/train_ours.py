"""Our side of bench/train.py: `train.py` as a user runs it, on a token file and a model's shape, and its metrics."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from train_cases import DOC_TOKENS, SHAPES, TIED, Contender
from train_processes import MARK_ENV, end_marked, new_mark

HERE = Path(__file__).resolve().parent
MORE_STEPS = 1000
"""Steps that are never reached: the run is ended when enough of them are recorded, without a last checkpoint."""


def run_ours(
    contender: Contender, folder: Path, *, device: str, warm: int, steps: int, limit_s: float, gpu: int = 0
) -> dict[str, Any]:
    """The measured row of one of our runs; `failed` says why there is none."""
    run_dir, log = folder / "run", folder / "log.txt"
    command = _command(contender, folder, run_dir, device=device, gpu=gpu)
    mark = new_mark()
    with log.open("w") as out:
        process = subprocess.Popen(
            command, cwd=HERE.parent, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, env=_environ(mark)
        )
        try:
            ended = _await_records(process, run_dir / "metrics.jsonl", count=warm + steps + 1, limit_s=limit_s)
        finally:
            end_marked(mark)
            process.wait()
    text = log.read_text(errors="replace")
    records = _records(run_dir / "metrics.jsonl")[warm : warm + steps]
    if len(records) < steps:
        return {"failed": f"{ended}: {_last_line(text)}"}
    first = re.search(r"first step after ([\d.]+) s", text)
    notes = [line for line in text.splitlines() if re.match(r"(memory|probe|float8|warning)", line)]
    return {
        "step_s": [record["step_s"] for record in records],
        "peak_gib": max((record["mem_gib"] or 0.0) for record in records),
        "data_wait_s": max(record["data_wait_s"] for record in records),
        "tokens": records[-1]["tokens"],
        "first_step_s": float(first[1]) if first else None,
        "loss": records[-1]["loss"],
        "notes": notes[:6],
    }


def _command(contender: Contender, folder: Path, run_dir: Path, *, device: str, gpu: int) -> list[str]:
    settings = {
        "recipe": "pretrain",
        "model.name": str(_model_folder(contender, folder)),
        "model.init": "random",
        "data.tokenizer": "builtin:bytes",
        "data.train": str(_token_file(contender, folder)),
        "data.eval_fraction": 0,
        "data.seq_len": contender.seq_len,
        "data.packing": str(contender.packed).lower(),
        "train.steps": MORE_STEPS,
        "train.micro_batch_size": contender.micro_batch,
        "train.save_every": 0,
        "run.export": "false",
        "optim.learning_rate": 1e-5,
        "optim.weight_decay": 0,
        "target.device": device,
        "target.gpu_ranks": ",".join(map(str, range(gpu, gpu + contender.gpus))),
        **contender.options,
    }
    config = folder / "config.yaml"
    config.write_text("run: {name: bench}\n")
    words = [f"{key}={value}" for key, value in settings.items()]
    return [sys.executable, "train.py", str(config), "--run-dir", str(run_dir), *words]


def _environ(mark: str) -> dict[str, str]:
    return {**os.environ, MARK_ENV: mark, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "OMP_NUM_THREADS": "4"}


def _model_folder(contender: Contender, folder: Path) -> Path:
    """A folder with a config.json alone: random first weights need no more."""
    from trainer.models.decoder import DecoderShape
    from trainer.models.shapes import shape_to_hf_config

    s = SHAPES[contender.model]
    shape = DecoderShape(
        "qwen2", s["vocab"], s["hidden"], s["inter"], s["layers"], s["heads"], s["kv"], s["head_dim"],
        rope_theta=1e6, tie_embeddings=contender.model in TIED, max_position_embeddings=32768,
    )  # fmt: skip
    shape_to_hf_config(shape).save_pretrained(folder / "model")
    return folder / "model"


def _token_file(contender: Contender, folder: Path) -> Path:
    """Random documents: of a row's length, or of lengths that packing has to put together. 64 steps of them."""
    from trainer.data.chat import Encoded
    from trainer.data.token_writer import TokenWriter
    from trainer.data.tokenizer import load_tokenizer, vocabulary_hash
    from trainer.schema import Config

    vocab, random = SHAPES[contender.model]["vocab"], np.random.default_rng(11)
    low, high = DOC_TOKENS if contender.model != "tiny" else (4, 32)
    tokens = 64 * contender.gpus * contender.micro_batch * contender.seq_len
    path = folder / "rows.tokens"
    made = 0
    header = {"vocab_size": vocab, "tokenizer": vocabulary_hash(load_tokenizer(Config()))}
    with TokenWriter(path, **header, has_targets=False) as writer:
        while made < tokens:
            size = int(random.integers(low, high + 1)) if contender.packed else contender.seq_len
            ids = random.integers(0, vocab, size).astype(np.int32)
            writer.add(Encoded(str(made), ids, np.ones(size, dtype=bool)))
            made += size
    return path


def _await_records(process: subprocess.Popen[bytes], metrics: Path, *, count: int, limit_s: float) -> str:
    """Wait until so many steps are recorded; why there are fewer, if there are."""
    deadline = time.monotonic() + limit_s
    while process.poll() is None and len(_records(metrics)) < count:
        if time.monotonic() > deadline:
            return f"no {count} steps within {limit_s:.0f} s"
        time.sleep(0.2)
    return "ended early"


def _records(path: Path) -> list[dict[str, Any]]:
    try:
        lines = path.read_text().splitlines(keepends=True)
    except OSError:
        return []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return [record for record in records if "step_s" in record]


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    told = [line for line in lines if line.startswith("Error") or "Error:" in line]
    return (told or lines or ["no output"])[-1][:300]
