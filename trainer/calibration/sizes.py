"""Which micro-batch sizes are timed, in which order, and when it is enough; and the config of each. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Protocol

from trainer.calibration.verdict import Timed, fastest
from trainer.data.batches.steps import global_batch_size
from trainer.schema import Config

FIRST_TOKENS = 4096
"""Of the first size on a GPU, where it fits: fewer do not fill one."""
SLOWER = 0.98
"""Of the best: a smaller difference between two sizes says nothing."""
TIME_S = 100.0
"""No size is begun after that."""


class Trial(Protocol):
    """What times a size of so many rows."""

    def why_too_large(self, rows: int) -> str | None:
        """Why it is not tried."""

    def time(self, rows: int) -> Timed | str:
        """What it costs, or why that cannot be had."""


def search(
    rows: Iterable[int], trial: Trial, *, seconds: Callable[[], float], tell: Callable[[Timed], None]
) -> tuple[list[Timed], str]:
    """The sizes that were timed, one after another, and why no larger one was. `seconds`: since the beginning."""
    timed: list[Timed] = []
    for size in rows:
        found = trial.why_too_large(size) or why_enough(timed, seconds()) or trial.time(size)
        if isinstance(found, str):
            return timed, found
        timed.append(found)
        tell(found)
    return timed, "a rank has no more rows in a step"


def first_size(seq_len: int, why_too_large: Callable[[int], str | None], *, on_gpu: bool) -> int:
    """Rows of the size to begin with."""
    rows = max(1, FIRST_TOKENS // seq_len) if on_gpu else 1
    while rows > 1 and why_too_large(rows):
        rows //= 2
    return rows


def sizes(config: Config, world_size: int, *, first: int) -> Iterator[int]:
    """Rows of a micro-batch, doubled each time, as far as a step has rows for every rank."""
    batch = given_batch(config, world_size)
    most = 2**20 if batch is None else -(-batch // world_size)
    rows = min(first, most)
    while rows <= most:
        yield rows
        rows *= 2


def why_enough(timed: list[Timed], seconds: float) -> str | None:
    """Why no further size is tried after these; None: go on."""
    best = fastest(timed)
    if best is not None and timed[-1].tokens_per_s_per_gpu < SLOWER * best.tokens_per_s_per_gpu:
        return f"{timed[-1].rows} rows are slower than {best.rows}"
    return f"{seconds:.0f} s have gone by" if seconds > TIME_S else None


def given_batch(config: Config, world_size: int) -> int | None:
    """Rows of a step over all ranks, where the config says how many."""
    train = config.train
    given = train.global_batch_size is not None or train.grad_accum_steps is not None
    return global_batch_size(config, world_size) if given else None


def with_rows(config: Config, rows: int, world_size: int) -> Config:
    """The config with another micro-batch and, where it says how many rows a step has, as many."""
    train, batch = config.train, given_batch(config, world_size)
    if batch is not None:
        train = replace(train, global_batch_size=batch, grad_accum_steps=None)
    if train.micro_batch_tokens is not None:
        return replace(config, train=replace(train, micro_batch_tokens=rows * config.data.seq_len))
    return replace(config, train=replace(train, micro_batch_size=rows))
