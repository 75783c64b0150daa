"""What timed micro-batch sizes say: a line of each, which is fastest, and the overrides to paste. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

HEADER = f"{'rows':>6}  {'plan':<58}{'step ms':>9}{'tok/s/GPU':>12}{'MFU':>8}{'peak GiB':>10}"


@dataclass(frozen=True)
class Timed:
    """What a micro-batch size costs."""

    rows: int
    """Of seq_len tokens each."""
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
    """All sizes that were timed, and why no larger one was."""

    timed: tuple[Timed, ...]
    ended: str
    configured: int
    """Rows of the config's own micro-batch."""
    global_batch: int | None
    """Rows per step over all ranks, where the config says how many; then it stays."""
    by_accumulation: bool
    """It says so by `grad_accum_steps`."""
    by_tokens: bool
    """The config counts a micro-batch in tokens."""
    seq_len: int

    @property
    def best(self) -> Timed | None:
        return fastest(self.timed)

    @property
    def overrides(self) -> list[str]:
        """To be pasted behind `train.py CONFIG`, for the best size."""
        if self.best is None:
            return []
        rows = self.best.rows
        size = f"micro_batch_tokens={rows * self.seq_len}" if self.by_tokens else f"micro_batch_size={rows}"
        kept = [] if self.global_batch is None else [f"global_batch_size={self.global_batch}"]
        dropped = ["grad_accum_steps=null"] if self.by_accumulation else []
        return [f"train.{words}" for words in (size, *kept, *dropped)]

    def render(self) -> list[str]:
        """The verdict in a few lines; the sizes were told as they came."""
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
