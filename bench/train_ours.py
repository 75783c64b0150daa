"""Our side of bench/train.py: runs `train.py` like a user, on a token file and a model's shape, and reads its
metrics."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from train_cases import SHAPES, Contender, doc_tokens, hf_config
from train_processes import MARK_ENV, end_marked, new_mark

HERE = Path(__file__).resolve().parent
MORE_STEPS = 1000
"""Steps that are never reached: the run is ended when enough of them are recorded, without a last checkpoint."""
DATA_STEPS = 64
"""Steps until rows repeat."""
IsEnough = Callable[[str, str], bool]
"""Takes a run's metrics.jsonl and output so far; returns whether the run may be ended."""
CACHE_VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def run_ours(
    contender: Contender, folder: Path, *, device: str, warm: int, steps: int, limit_s: float, gpu: int = 0
) -> dict[str, Any]:
    """The measurements of a run of ours in `folder`; `failed` has the reason if there are none. Its output is in
    `log.txt`."""
    metrics, log = run_until(
        contender,
        folder,
        device=device,
        limit_s=limit_s,
        gpu=gpu,
        is_enough=lambda metrics, log: len(step_records(metrics)) > warm + steps,
    )
    return parse_run(metrics, log, warm=warm, steps=steps)


def run_until(
    contender: Contender, folder: Path, *, device: str, limit_s: float, is_enough: IsEnough, gpu: int = 0
) -> tuple[str, str]:
    """Runs ours in `folder` until `is_enough`; returns its metrics.jsonl and its output."""
    run_dir, log = folder / "run", folder / "log.txt"
    write_model(contender.model, folder / "model")
    write_tokens(contender, folder / "rows.tokens")
    (folder / "config.yaml").write_text("run: {name: bench}\n")
    command = build_command(contender, folder, device=device, gpu=gpu)
    mark = new_mark()
    environ = {**build_environ(contender, os.environ, folder.parent), MARK_ENV: mark}

    def written() -> tuple[str, str]:
        return _read(run_dir / "metrics.jsonl"), _read(log)

    with log.open("w") as out:
        process = subprocess.Popen(
            command, cwd=HERE.parent, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, env=environ
        )
        try:
            deadline = time.monotonic() + limit_s
            while process.poll() is None and time.monotonic() < deadline and not is_enough(*written()):
                time.sleep(0.2)
        finally:
            end_marked(mark)
            process.wait()
    return written()


def build_command(contender: Contender, folder: Path, *, device: str, gpu: int) -> list[str]:
    """`train.py` with the case's overrides, without values that its defaults would choose."""
    settings = {
        "recipe": "pretrain",
        "model.name": str(folder / "model"),
        "model.init": "random",
        "data.tokenizer": "builtin:bytes",
        "data.train": str(folder / "rows.tokens"),
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
    words = [f"{key}={value}" for key, value in settings.items()]
    return [sys.executable, "train.py", str(folder / "config.yaml"), "--run-dir", str(folder / "run"), *words]


def build_environ(contender: Contender, environ: Mapping[str, str], folder: Path) -> dict[str, str]:
    """The environment of a run; if the row names a cache, it is in `folder`."""
    made = {**environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "OMP_NUM_THREADS": "4"}
    if contender.cache:
        made = {name: value for name, value in made.items() if name not in CACHE_VARIABLES}
        made["TORCHFERRY_CACHE"] = str(folder / f"cache-{contender.cache}")
    return made


def write_model(model: str, folder: Path) -> None:
    """Makes a folder with only a config.json: random initial weights need no more."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(hf_config(model)))


def write_tokens(contender: Contender, path: Path) -> None:
    """Random documents, the same every time: with a row's length, or with lengths that have to be packed."""
    from trainer.data.tokenize.chat import Encoded
    from trainer.data.tokenize.token_writer import TokenWriter
    from trainer.data.tokenize.tokenizer import load_tokenizer, vocabulary_hash
    from trainer.schema import Config

    vocab, random = SHAPES[contender.model]["vocab"], np.random.default_rng(11)
    low, high = doc_tokens(contender.model) if contender.packed else (contender.seq_len, contender.seq_len)
    left = DATA_STEPS * contender.gpus * contender.micro_batch * contender.seq_len
    tokenizer = vocabulary_hash(load_tokenizer(Config()))
    with TokenWriter(path, vocab_size=vocab, tokenizer=tokenizer, has_targets=False) as writer:
        while left > 0:
            size = int(random.integers(low, high + 1))
            ids = random.integers(0, vocab, size).astype(np.int32)
            writer.add(Encoded(str(left), ids, np.ones(size, dtype=bool)))
            left -= size


def parse_run(metrics: str, log: str, *, warm: int, steps: int) -> dict[str, Any]:
    """The counted steps of a run, from its output; `failed` with the log's last error if there are too few."""
    recorded = step_records(metrics)
    records = recorded[warm : warm + steps]
    if len(records) < steps:
        return {"failed": f"ended after {len(recorded)} of {warm + steps} steps: {last_word(log)}"}
    first = re.search(r"first step after ([\d.]+) s", log)
    mfus = [record["mfu"] for record in records if record.get("mfu")]
    return {
        "step_s": [record["step_s"] for record in records],
        "tokens": statistics.fmean(record["tokens"] for record in records),
        "mfu": statistics.median(mfus) if mfus else None,
        "peak_gib": max(record["mem_gib"] or 0.0 for record in records),
        "data_wait_s": max(record["data_wait_s"] for record in records),
        "first_step_s": float(first[1]) if first else None,
        "loss": records[-1]["loss"],
        "notes": [line for line in log.splitlines() if re.match(r"(memory|probe|float8|warning)", line)][:6],
    }


def step_records(metrics: str) -> list[dict[str, Any]]:
    """The training steps in a metrics.jsonl that may still be written."""
    records = [json.loads(line) for line in metrics.splitlines(keepends=True) if line.endswith("\n")]
    return [record for record in records if "step_s" in record]


def last_word(log: str) -> str:
    """A log's last error, else its last line."""
    lines = [line for line in log.splitlines() if line.strip()]
    told = [line for line in lines if line.startswith("Error") or "Error:" in line]
    return (told or lines or ["no output"])[-1][:300]


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
