"""A run that is killed again and again, anywhere, ends as if it had never been.

A chain is one run folder: start, SIGKILL to one rank, start again from what is there, and so on; the last start ends.
Ranks and savers are forked from a process that has imported torch, so that a start costs a fraction of a second.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.support.ranks import FORKED, run_ranks
from tests.support.trainings import build, losses
from trainer.batch import Batch, LossSum
from trainer.checkpoint.folders import damages, newest_complete, steps_in
from trainer.checkpoint.load import read_info
from trainer.dist import Dist
from trainer.train import loop

INSIDE = ("staged", "begun", "shards", "random", "state", "marker", "replaced", "renamed", "committed", "pruned")
ON_RANK_0 = ("state", "marker", "replaced", "renamed")
SAVE_EVERY = 2
FIELDS = {"save_every": SAVE_EVERY, "eval_every": 0, "keep_last": 2, "micro_batch_size": 6}


@dataclass(frozen=True)
class Kill:
    """Rank `victim` of `world_size` dies at a point of its `nth` save, or `delay_s` after its `nth` forward began."""

    world_size: int
    victim: int
    point: str | None
    nth: int
    delay_s: float = 0.0


def plan_kills(world_sizes: list[int], seed: int) -> list[Kill]:
    """One kill for each start, every other one inside a save."""
    rng = random.Random(seed)
    kills = []
    for number, world_size in enumerate(world_sizes):
        victim = rng.randrange(world_size)
        if number % 2 == 0:
            # a save replaces an older folder of its step only after a fall back, which no chain has
            points = [p for p in INSIDE if p != "replaced" and (victim == 0 or p not in ON_RANK_0)]
            kills.append(Kill(world_size, victim, rng.choice(points), rng.randint(1, 2)))
        else:
            kills.append(Kill(world_size, victim, None, rng.randint(1, 2 * SAVE_EVERY + 1), rng.uniform(0, 0.03)))
    return kills


class Killer:
    """Counts the points or the forwards of its own rank, and kills this process at the planned one."""

    def __init__(self, kill: Kill, rank: int) -> None:
        self._kill = kill if kill.victim == rank else None
        self._seen = 0

    def at(self, point: str) -> None:
        if self._kill is not None and point == self._kill.point:
            self._count()

    def forward(self) -> None:
        if self._kill is not None and self._kill.point is None:
            self._count()

    def _count(self) -> None:
        assert self._kill is not None
        self._seen += 1
        if self._seen == self._kill.nth:
            threading.Timer(
                self._kill.delay_s, kill_this_process
            ).start() if self._kill.delay_s else kill_this_process()


def kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def attempt(dist: Dist, rows: str, run_dir: str, steps: int, kill: Kill | None) -> int:
    """One start of the run, from whatever is in its folder; the step it began at."""
    run = build(rows, Path(run_dir), dist, steps=steps, **FIELDS)
    start_step, loss_fn = run.start_step, run.loss_fn
    killer = Killer(kill or Kill(0, -1, None, 0), dist.rank)

    def observed(module: torch.nn.Module, batch: Batch) -> LossSum:
        killer.forward()
        return loss_fn(module, batch)

    run.loss_fn = observed
    loop.train(run, on_stage=killer.at, beside=FORKED)
    run.log.close()
    return start_step


def records_after(rows: str, run_dir: Path, steps: int, kills: list[Kill], *, last: int) -> list[dict]:
    """The records of a run that was killed so often and then ended with `last` ranks; checked after every kill."""
    newest = None
    for kill in kills:
        with pytest.raises(RuntimeError, match=r"ended without a result|failed"):
            run_ranks(attempt, kill.world_size, rows, str(run_dir), steps, kill, grace_s=0.3, savers=True)
        newest = check_checkpoints(run_dir / "checkpoints", newest, kill)
    (start_step, *_) = run_ranks(attempt, last, rows, str(run_dir), steps, None, savers=True)
    assert start_step == (newest or 0)
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def check_checkpoints(folder: Path, before: int | None, kill: Kill) -> int | None:
    """A checkpoint that was there, or a later one, is there and whole; the newest one's step."""
    for path in steps_in(folder).values():
        assert damages(path, read_info(path).files) == [], kill
    path = newest_complete(folder)
    step = None if path is None else read_info(path).step
    assert before is None or (step is not None and step >= before), (kill, before, step)
    return step


@pytest.fixture(scope="module")
def unbroken(rows, tmp_path_factory):
    """Losses of the unbroken run of so many steps at a world size; each is run once."""
    known: dict[tuple[int, int], list[float]] = {}

    def run(world_size: int, steps: int) -> list[float]:
        key = world_size, steps
        if key not in known:
            known[key] = losses(records_after(rows, tmp_path_factory.mktemp("whole") / "run", steps, [], last=key[0]))
        return known[key]

    return run


def check_chain(
    rows: str,
    run_dir: Path,
    unbroken,
    sizes: list[int],
    *,
    last: int,
    seed: int,
    tolerance: float = 1e-5,
) -> None:
    """One run killed at each of these world sizes in turn, compared with the unbroken one, step by step."""
    steps = 6 * len(sizes) + 2  # more than the starts can reach
    found = losses(records_after(rows, run_dir, steps, plan_kills(sizes, seed), last=last))
    expected = unbroken(last, steps)
    assert len(found) == steps
    if set(sizes) == {last}:
        assert found == expected
    else:
        assert found == pytest.approx(expected, abs=tolerance)


def drift(unbroken, sizes: list[int], steps: int) -> float:
    """The most that the number of ranks alone changes in any step's loss, nobody being killed."""
    one, *others = (unbroken(size, steps) for size in sorted(set(sizes)))
    return max(abs(a - b) for other in others for a, b in zip(one, other, strict=True))


def test_killed_runs_of_one_rank_end_bit_for_bit_like_the_unbroken_one(rows, tmp_path, unbroken):
    check_chain(rows, tmp_path / "run", unbroken, [1] * 8, last=1, seed=1)


def test_killed_runs_of_two_ranks_end_bit_for_bit_like_the_unbroken_one(rows, tmp_path, unbroken):
    check_chain(rows, tmp_path / "run", unbroken, [2] * 7, last=2, seed=2)


def test_run_killed_at_changing_numbers_of_ranks_ends_like_the_unbroken_one(rows, tmp_path, unbroken):
    check_chain(rows, tmp_path / "run", unbroken, [2, 1, 3, 4, 1], last=2, seed=3)


def test_at_least_a_third_of_the_kills_is_inside_a_save():
    plans = [plan_kills([1] * 8, 1), plan_kills([2] * 7, 2), plan_kills([2, 1, 3, 4, 1], 3)]
    kills = [kill for plan in plans for kill in plan]
    assert len(kills) == 20
    assert sum(kill.point is not None for kill in kills) >= 7


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10, 20))
def test_two_hundred_kills(rows, tmp_path, unbroken, seed):
    check_chain(rows, tmp_path / "one", unbroken, [1] * 7, last=1, seed=seed)
    check_chain(rows, tmp_path / "two", unbroken, [2] * 7, last=2, seed=seed + 100)
    sizes = [2, 3, 1, 4, 2, 1]
    # over so many steps rounding alone may be more than 1e-5 apart
    tolerance = max(1e-5, 2 * drift(unbroken, sizes, steps=38))
    check_chain(rows, tmp_path / "many", unbroken, sizes, last=3, seed=seed + 200, tolerance=tolerance)
