"""Runs that were cut and resumed, compared with the run that nobody disturbed."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from tests.oracles.measure import Oracle, largest_difference, series_difference, worst
from tests.oracles.runs import records_of, run_config, write_rows
from tests.support.ranks import run_ranks
from trainer.dist import Dist
from trainer.schema import CHECKPOINTS_DIR, EXPORT_DIR, Config

STEPS = 11
RESUMED_AT = range(1, STEPS)


def resumable(rows: str, **train: Any) -> Config:
    fields = {
        "steps": STEPS,
        "deterministic": True,
        "micro_batch_size": 2,
        "save_every": 1,
        "keep_last": 0,
        "eval_every": 3,
    }
    return run_config(
        rows,
        target={"train_backend": "auto"},
        data={"packing": True, "shuffle": True, "eval_fraction": 0.2},
        optim={"learning_rate": 1e-3},
        train=fields | train,
        run={"export": True},
    )


Outcome = tuple[list[dict[str, Any]], dict[str, Tensor]]
"""The records of a run, and the weights at its end, where it came to its end."""


def outcome(config: Config, run_dir: Path, dist: Dist) -> Outcome:
    records = records_of(config, run_dir, dist)
    file = run_dir / EXPORT_DIR / "model.safetensors"
    return records, load_file(file) if file.exists() else {}


def values(records: list[dict[str, Any]], *, after: int = -1) -> list[float]:
    """What the records tell of the steps after that one, in order."""
    keys = ("loss", "grad_norm", "eval_loss")
    return [record[key] for record in records if record["step"] > after for key in keys if key in record]


def changes(got: Outcome, expected: Outcome, *, after: int = -1, relative: bool = False) -> list[float]:
    """How far a resumed run's records after a step, and its weights, are from those of the whole run."""
    weights = [largest_difference(got[1][name], weight) for name, weight in expected[1].items()]
    pair = values(got[0], after=after), values(expected[0], after=after)
    return [series_difference(*pair, relative=relative), *weights]


def largest_change(dist: Dist, rows: str, folder: str) -> float:
    """Over a resume after each step."""
    whole = Path(folder) / "whole"
    expected = outcome(resumable(rows), whole, dist)
    found = []
    for step in RESUMED_AT:
        config = resumable(rows, resume=str(whole / CHECKPOINTS_DIR / f"step_{step:06d}"))
        found += changes(outcome(config, Path(folder) / f"from_{step}", dist), expected, after=step)
    return worst(found)


def same_ranks_difference(folder: Path, *, ranks: int) -> float:
    return worst(run_ranks(largest_change, ranks, write_rows(folder), str(folder)))


def some_steps(dist: Dist, rows: str, run_dir: str, stop_after_steps: int | None) -> Outcome:
    return outcome(resumable(rows, stop_after_steps=stop_after_steps, save_every=0), Path(run_dir), dist)


def other_ranks_difference(folder: Path) -> float:
    """Relative for losses and norms, absolute for the weights."""
    rows = write_rows(folder)
    expected = run_ranks(some_steps, 1, rows, str(folder / "whole"), None)[0]
    for ranks, steps in ((1, 4), (2, 4), (3, None)):
        got = run_ranks(some_steps, ranks, rows, str(folder / "cut"), steps)[0]
    return worst(changes(got, expected, relative=True))


UNDISTURBED = "our own uninterrupted run"
ORACLES = [
    *(
        Oracle(
            "losses, evaluations, gradient norms and final weights of a resumed run",
            UNDISTURBED,
            f"resumed after each of steps 1 to 10, {ranks} rank{'s' * (ranks > 1)}",
            0.0,
            partial(same_ranks_difference, ranks=ranks),
        )
        for ranks in (1, 2)
    ),
    Oracle(
        "losses, evaluations, gradient norms and final weights of a resumed run",
        UNDISTURBED,
        "4 steps on 1 rank, 4 on 2, 3 on 3",
        1e-6,
        other_ranks_difference,
    ),
]
