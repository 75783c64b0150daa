"""Whole runs of a small model: built, trained, and what they wrote."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.configs import SMALL_MODEL, config_of
from tests.support.ranks import run_ranks
from tests.support.tiny import ALONE
from trainer.batch import LossSum
from trainer.dist import Dist
from trainer.recipes import sft
from trainer.schema import Config
from trainer.train.build import build_run, seed_everything
from trainer.train.recipe import Recipe, read_basis
from trainer.train.run import Run

STEPS = 8


def training_on(rows: str, **train) -> Config:
    backend = train.pop("backend", "auto")
    steps = {"steps": STEPS, "micro_batch_size": 2, "global_batch_size": 6, "eval_every": 4, "save_every": 0}
    return config_of(
        target={"train_backend": backend},
        model=SMALL_MODEL,
        data={"train": [rows], "eval_fraction": 0.2, "seq_len": 96},
        optim={"learning_rate": 1e-2, "warmup_steps": 2},
        train=steps | train,
        run={"export": False},
    )


def train_rank(dist: Dist, rows: str, run_dir: str, fields: dict) -> dict:
    """One start of the recipe; what outcome.json says afterwards."""
    Path(run_dir).mkdir(exist_ok=True)
    fields = {"backend": "auto" if dist.world_size > 1 else "pytorch", **fields}
    config = training_on(rows, **fields)
    sft.run(config, Path(run_dir), dist)
    return json.loads((Path(run_dir) / "outcome.json").read_text())


def train(ranks: int, rows: str, run_dir: Path, **fields) -> list[dict]:
    """All records of metrics.jsonl after a start on that many ranks."""
    if ranks == 1:
        train_rank(ALONE, rows, str(run_dir), fields)
    else:
        run_ranks(train_rank, ranks, rows, str(run_dir), fields)
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def losses(records: list[dict]) -> list[float]:
    return [record["loss"] for record in records if "loss" in record]


def build(rows: str, run_dir: Path, dist: Dist = ALONE, **fields) -> Run:
    config = training_on(rows, **fields)
    run_dir.mkdir(exist_ok=True)
    seed_everything(config, dist)
    return build_of(config, run_dir, dist)


def build_of(config: Config, run_dir: Path, dist: Dist = ALONE, *, recipe: Recipe | None = None) -> Run:
    """What the recipe, as a rule sft, makes of a whole config; tokens stay in memory."""
    recipe = recipe or sft.recipe()
    basis = read_basis(recipe, config, dist)
    return build_run(recipe, config, run_dir, dist, basis=basis, data=recipe.data(config, dist, basis, run_dir=None))


def poison(run: Run, *, steps: set[int], rank: int = 0) -> None:
    """Make the loss of these steps (counted from 1) NaN on one rank. One micro-batch a step is assumed."""
    loss_fn, calls = run.loss_fn, []

    def poisoned(module, batch) -> LossSum:
        loss = loss_fn(module, batch)
        if not module.training:
            return loss
        calls.append(1)
        bad = len(calls) in steps and run.dist.rank == rank
        return LossSum(loss.total * float("nan"), loss.count) if bad else loss

    run.loss_fn = poisoned
