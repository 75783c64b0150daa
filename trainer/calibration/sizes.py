"""Micro-batch sizes: their choice and order, the end of the search, and the result. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from trainer.data.batches.steps import global_batch_size
from trainer.schema import Config

HEADER = f"{'rows':>6}  {'plan':<58}{'step ms':>9}{'tok/s/GPU':>12}{'MFU':>8}{'peak GiB':>10}"
FIRST_TOKENS = 4096
"""Tokens of the first size on a GPU, if it fits: fewer do not keep one busy."""
SLOWER = 0.98
"""Share of the best throughput: a smaller difference between two sizes is noise."""
TIME_S = 100.0
"""No size is started after this time."""


@dataclass(frozen=True)
class Timed:
    """The measurement of a micro-batch size."""

    rows: int
    """Rows of seq_len tokens each."""
    plan: str
    step_ms: float
    micro_batches: int
    """Forwards of each timed step."""
    tokens_per_s_per_gpu: float
    mfu: float | None
    peak_gib: float | None

    def render(self) -> str:
        """A line of the table under HEADER."""
        mfu = "-" if self.mfu is None else f"{self.mfu:.1%}"
        peak = "-" if self.peak_gib is None else f"{self.peak_gib:.1f}"
        plan = self.plan.removeprefix("activation_checkpointing=")
        return f"{self.rows:>6}  {plan:<58}{self.step_ms:>9.1f}{self.tokens_per_s_per_gpu:>12,.0f}{mfu:>8}{peak:>10}"


def fastest(timed: list[Timed] | tuple[Timed, ...]) -> Timed | None:
    return max(timed, key=lambda one: one.tokens_per_s_per_gpu, default=None)


@dataclass(frozen=True)
class Calibration:
    """All timed sizes, and the reason why no larger one was timed."""

    timed: tuple[Timed, ...]
    ended: str
    configured: int
    """Rows of the config's micro-batch."""
    global_batch: int | None
    """Rows per step over all ranks, if the config sets it; then it stays."""
    by_accumulation: bool
    """The config sets it with `grad_accum_steps`."""
    by_tokens: bool
    """The config counts a micro-batch in tokens."""
    seq_len: int

    @property
    def best(self) -> Timed | None:
        return fastest(self.timed)

    @property
    def overrides(self) -> list[str]:
        """Overrides for the best size, to paste behind `train.py CONFIG`."""
        if self.best is None:
            return []
        rows = self.best.rows
        size = f"micro_batch_tokens={rows * self.seq_len}" if self.by_tokens else f"micro_batch_size={rows}"
        kept = [] if self.global_batch is None else [f"global_batch_size={self.global_batch}"]
        dropped = ["grad_accum_steps=null"] if self.by_accumulation else []
        return [f"train.{words}" for words in (size, *kept, *dropped)]

    def render(self) -> list[str]:
        """The result in a few lines; the sizes have already been printed."""
        best = self.best
        if best is None:
            return [f"no size was timed: {self.ended}"]
        own = next((one for one in self.timed if one.rows == self.configured), None)
        gain = "" if own is None or own is best else f", {best.tokens_per_s_per_gpu / own.tokens_per_s_per_gpu:.2f} x"
        than = f"{gain} of the configured {self.configured}" if gain else ""
        lines = [f"no larger size: {self.ended}", f"fastest: {best.rows} rows{than}", " ".join(self.overrides)]
        if self.global_batch is None and best.rows != self.configured:
            step = f"a step is then of {best.rows} instead of {self.configured} rows a micro-batch"
            lines.append(f"note: {step}: train.global_batch_size keeps it as it is, or another learning rate may fit")
        return lines

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        timed = [asdict(one) for one in self.timed]
        best = self.best.rows if self.best else None
        return {"timed": timed, "ended": self.ended, "best_rows": best, "overrides": self.overrides}


# --- the choice of sizes ---------------------------------------------------------------------------------------------


class Trial(Protocol):
    """Times a size of `rows` rows."""

    def why_too_large(self, rows: int) -> str | None:
        """The reason why the size is not tried; None: try it."""

    def time(self, rows: int) -> Timed | str:
        """The measurement, or the reason why it failed."""


def search(
    rows: Iterable[int], trial: Trial, *, seconds: Callable[[], float], tell: Callable[[Timed], None]
) -> tuple[list[Timed], str]:
    """Time one size after another. Returns the timed ones, and why no larger one was timed. `seconds`: since the
    start."""
    timed: list[Timed] = []
    for size in rows:
        found = trial.why_too_large(size) or why_enough(timed, seconds()) or trial.time(size)
        if isinstance(found, str):
            return timed, found
        timed.append(found)
        tell(found)
    return timed, "a rank has no more rows in a step"


def first_size(seq_len: int, why_too_large: Callable[[int], str | None], *, on_gpu: bool) -> int:
    """Rows of the first size."""
    rows = max(1, FIRST_TOKENS // seq_len) if on_gpu else 1
    while rows > 1 and why_too_large(rows):
        rows //= 2
    return rows


def sizes(config: Config, world_size: int, *, first: int) -> Iterator[int]:
    """Rows of a micro-batch, doubled each time, up to a rank's rows of a step."""
    batch = given_batch(config, world_size)
    most = 2**20 if batch is None else -(-batch // world_size)
    rows = min(first, most)
    while rows <= most:
        yield rows
        rows *= 2


def why_enough(timed: list[Timed], seconds: float) -> str | None:
    """Why no further size is tried after these; None: continue."""
    best = fastest(timed)
    if best is not None and timed[-1].tokens_per_s_per_gpu < SLOWER * best.tokens_per_s_per_gpu:
        return f"{timed[-1].rows} rows are slower than {best.rows}"
    return f"{seconds:.0f} s have gone by" if seconds > TIME_S else None


def given_batch(config: Config, world_size: int) -> int | None:
    """Rows of a step over all ranks, if the config sets it."""
    train = config.train
    given = train.global_batch_size is not None or train.grad_accum_steps is not None
    return global_batch_size(config, world_size) if given else None


def with_rows(config: Config, rows: int, world_size: int) -> Config:
    """The config with another micro-batch, and with the same rows per step if it sets them."""
    train, batch = config.train, given_batch(config, world_size)
    if batch is not None:
        train = replace(train, global_batch_size=batch, grad_accum_steps=None)
    if train.micro_batch_tokens is not None:
        return replace(config, train=replace(train, micro_batch_tokens=rows * config.data.seq_len))
    return replace(config, train=replace(train, micro_batch_size=rows))
