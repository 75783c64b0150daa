"""Decides which checkpoints of a run stay on disk."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainer.checkpoint.errors import CheckpointError
from trainer.checkpoint.folders import remove, steps_in
from trainer.checkpoint.load import read_info

METRIC = "eval_loss"
"""In state.json: the held-out loss of exactly these weights, if it was measured."""


@dataclass(frozen=True)
class Keep:
    """Keeps the `last` newest checkpoints, the `best` by held-out loss, and every step that is a multiple of `every`
    (0: none). `last` 0 keeps all."""

    last: int = 0
    best: int = 0
    every: int = 0


def prune(folder: Path, keep: Keep, *, newest: int) -> list[Path]:
    """Delete the complete checkpoints that retention does not keep, and return their paths. Only the first rank on each
    storage calls this.

    A checkpoint that cannot be read now may be the best one, and stays. A damaged one counts as one without a loss.
    """
    paths, saved, unread = steps_in(folder), dict[int, float | None](), set[int]()
    for step, path in paths.items():
        saved[step] = None
        try:
            saved[step] = _read_metric(path) if keep.best else None
        except CheckpointError as error:
            if isinstance(error.__cause__, OSError):
                unread.add(step)
    doomed = [paths[step] for step in to_delete(saved, keep, newest=newest) if step > newest or step not in unread]
    for path in doomed:
        remove(path)
    return doomed


def to_delete(saved: Mapping[int, float | None], keep: Keep, *, newest: int) -> list[int]:
    """The saved steps to delete. `saved`: each step's held-out loss; `newest` was just saved and always stays.

    Steps after `newest` are always deleted: the run restarted before them, and a resume would use them as its own. Of
    equal losses the later step is better.
    """
    own = sorted(step for step in saved if step <= newest)
    later = sorted(step for step in saved if step > newest)
    if keep.last == 0:
        return later
    losses = {step: loss for step in own if (loss := saved[step]) is not None and math.isfinite(loss)}
    best = sorted(losses, key=lambda step: (losses[step], -step))[: keep.best]
    wanted = {newest, *own[-keep.last :], *best} | {step for step in own if keep.every and step % keep.every == 0}
    return [step for step in own if step not in wanted] + later


def best_in(folder: Path, *, newest: int, among: Collection[int] | None = None) -> tuple[int, float] | None:
    """The step, up to `newest`, of the complete checkpoint with the lowest held-out loss, and that loss; None if no
    checkpoint has one. `among`: only of these steps.

    Of equal losses the later step is better.
    """
    there = {step: path for step, path in steps_in(folder).items() if among is None or step in among}
    losses = {step: loss for step, path in there.items() if (loss := _metric(path)) is not None}
    known = {step: loss for step, loss in losses.items() if step <= newest and math.isfinite(loss)}
    return min(known.items(), key=lambda item: (item[1], -item[0]), default=None)


def _metric(path: Path) -> float | None:
    with suppress(CheckpointError):  # reported when it is loaded
        return _read_metric(path)
    return None


def _read_metric(path: Path) -> float | None:
    value = read_info(path).extra.get(METRIC)
    return float(value) if isinstance(value, int | float) else None
