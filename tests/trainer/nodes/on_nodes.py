"""Starts of a small run on several nodes that share a run folder or not: ranks that are forked, as torchrun tells them.

Each node has a run folder of its own name, so that nothing is shared unless two nodes are given the same one.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.support.ranks import FORKED, run_ranks
from tests.support.trainings import build_of, losses, training_on
from trainer.config.load import config_from_dict, config_to_dict
from trainer.config.target import ANY_WORLD
from trainer.dist import Dist
from trainer.saver.writer import AsyncSave
from trainer.start.storage import find_storages
from trainer.train import loop
from trainer.train.build import seed_everything
from trainer.train.resolve_defaults import resolve_defaults

FIELDS = {"save_every": 2, "eval_every": 0, "keep_last": 0, "micro_batch_size": 2, "async_save": False}
FULL = {"sharding_strategy": "FULL_SHARD"}


def start(
    counts: Sequence[int],
    rows: str,
    folders: Sequence[Path],
    *,
    parallel: dict[str, Any] | None = None,
    dies: tuple[int, str] | None = None,
    savers: bool = False,
    blocks: int | None = None,
    **fields: Any,
) -> list[dict[str, Any]]:
    """One start on nodes with so many ranks; `folders`: the run folder of each. What each rank found and did.

    `dies`: a rank, and the stage of its first save at which its process ends. `blocks`: a rank that cannot give its
    part of the first save its name.
    """
    given = [str(folder) for folder in folders]
    nodes = tuple(counts) if len(counts) > 1 else ()
    how = {"parallel": parallel or {}, "dies": dies, "savers": savers, "blocks": blocks, "fields": FIELDS | fields}
    return run_ranks(train_rank, sum(counts), rows, given, how, savers=savers, nodes=nodes)


def train_rank(dist: Dist, rows: str, folders: list[str], how: dict[str, Any]) -> dict[str, Any]:
    told = io.StringIO()
    with redirect_stdout(told):
        found = train_here(dist, rows, folders, how)
    return {**found, "told": told.getvalue()}


def train_here(dist: Dist, rows: str, folders: list[str], how: dict[str, Any]) -> dict[str, Any]:
    node = dist.nodes.of_rank[dist.rank] if dist.nodes else 0
    run_dir = Path(folders[node])
    run_dir.mkdir(parents=True, exist_ok=True)
    dist = find_storages(dist, run_dir)
    backend = "pytorch" if dist.world_size == 1 else how["fields"].pop("backend", "fsdp")
    tree = config_to_dict(training_on(rows, backend=backend, **how["fields"]))
    tree["parallel"] |= how["parallel"]
    resolved = resolve_defaults(config_from_dict(tree, world=ANY_WORLD), dist, run_dir)
    seed_everything(resolved.config, dist)
    run = build_of(resolved.config, run_dir, dist)
    dies = how["dies"]

    def at(stage: str) -> None:
        if dies is not None and (dist.rank, stage) == tuple(dies):
            os._exit(1)
        first = run_dir / "checkpoints" / "step_000002"
        if how["blocks"] == dist.rank and stage == "state" and (run_dir / "checkpoints" / ".tmp_step_000002").exists():
            first.mkdir()
            (first.with_name(".tmp_step_000002_replaced") / "full").mkdir(parents=True)

    beside = FORKED if how["savers"] else AsyncSave()
    loop.train(run, on_stage=at, beside=beside)
    run.log.close()
    return {
        "start": run.start_step,
        "storages": asdict(dist.storages) if dist.storages else None,
        "lines": resolved.lines,
        "plan": run.backend.describe(),
    }


def checkpoints(folder: Path) -> list[str]:
    """The names in a run's folder of checkpoints."""
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def state_of(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / "state.json").read_text())


def losses_in(folder: Path) -> list[float]:
    return losses([json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()])
