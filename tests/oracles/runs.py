"""Whole runs on a small data set, ours by the recipe, and what came of them."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.support.ranks import barrier
from tests.support.tiny import ALONE
from trainer.config.load import config_from_dict
from trainer.dist import Dist
from trainer.schema import METRICS_FILE, Config

SEQ_LEN = 96


def write_rows(folder: Path, count: int = 60) -> str:
    """A JSONL of questions and answers of many lengths."""
    path = folder / "rows.jsonl"
    pairs = [{"question": f"what is {n}?", "answer": "na " * (1 + n * n % 13) + str(n)} for n in range(count)]
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return str(path)


def run_config(rows: str, *, recipe: str = "sft", **sections: dict[str, Any]) -> Config:
    """A run of 20 fp32 steps of 6 rows on the CPU, with the given keys in place of its own."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1}
    own: dict[str, dict[str, Any]] = {
        "target": {"device": "cpu", "train_backend": "pytorch"},
        "model": sizes,
        "data": {"train": [rows], "eval_fraction": 0.0, "seq_len": SEQ_LEN, "packing": False, "shuffle": False},
        "optim": {"learning_rate": 1e-2, "warmup_steps": 2},
        "train": {
            "steps": 20,
            "micro_batch_size": 6,
            "global_batch_size": 6,
            "precision": "fp32",
            "save_every": 0,
        },
        "run": {"export": False},
    }
    if "model" in sections:
        own["model"] = {}  # a named model brings its sizes
    merged = {name: fields | sections.get(name, {}) for name, fields in own.items()}
    return config_from_dict({"recipe": recipe, **merged})


def records_of(config: Config, run_dir: Path, dist: Dist = ALONE) -> list[dict[str, Any]]:
    """Train as configured; the records of metrics.jsonl, of steps and evaluations."""
    run_dir.mkdir(parents=True, exist_ok=True)
    import_module(f"trainer.recipes.{config.recipe}").run(config, run_dir, dist)
    barrier(dist)  # rank 0 writes them
    return [json.loads(line) for line in (run_dir / METRICS_FILE).read_text().splitlines()]
