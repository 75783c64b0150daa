"""A job's metrics.jsonl as series of numbers by key. The job's program wrote the file, so all sizes are limited."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from deployer.agent.host.typed import InvalidData, load_json

MAX_BYTES = 64 << 20
"""Of a longer file, only the end is read."""
MAX_LINE = 64 << 10
MAX_KEYS = 100
MAX_KEY_LENGTH = 100
MAIN_KEYS = ("loss", "eval_loss", "lr", "grad_norm", "tokens_per_s_per_gpu", "mfu", "mem_gib")
"""The trainer's keys that people look at first, in this order."""


@dataclass(frozen=True)
class Series:
    """The values of one key in the order of steps. NaN stands for a value that is not a finite number."""

    steps: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[tuple[float, float]]:
        return zip(self.steps, self.values, strict=True)

    @property
    def is_drawable(self) -> bool:
        return any(map(math.isfinite, self.values))

    @property
    def last(self) -> float | None:
        """The last finite value."""
        return next((value for value in reversed(self.values) if math.isfinite(value)), None)

    def put(self, step: float, value: float) -> None:
        """Adds a value; replaces one of the same step, and drops later steps."""
        self.cut(step)
        self.steps.append(step)
        self.values.append(value)

    def cut(self, step: float) -> None:
        """Drops the values at this step and later."""
        if self.steps and self.steps[-1] >= step:
            keep = bisect_left(self.steps, step)
            del self.steps[keep:], self.values[keep:]

    def at(self, step: float) -> float | None:
        """The value of the latest step up to this one; None before the first."""
        index = bisect_right(self.steps, step)
        return self.values[index - 1] if index else None


@dataclass
class Metrics:
    """The content of a metrics.jsonl file."""

    series: dict[str, Series] = field(default_factory=dict)
    records: int = 0
    damaged: int = 0
    """Lines that are not a record: broken, too long, or not a JSON object."""
    is_cut: bool = False
    """Whether the file is longer than MAX_BYTES, so that its beginning is missing here."""

    @property
    def keys(self) -> list[str]:
        """The keys that have a finite value, the main ones first."""
        found = [key for key, series in self.series.items() if series.is_drawable]
        order = {key: number for number, key in enumerate(MAIN_KEYS)}
        return sorted(found, key=lambda key: (order.get(key, len(order)), key))

    def get(self, key: str) -> Series:
        """The values of a key; empty if there are none."""
        return self.series.get(key) or Series()

    def add(self, record: dict[str, Any]) -> None:
        """Adds the numbers of one line. A line without a step gets its line number as the step.

        If the step of a key goes back, the run continued from an earlier checkpoint or started again: the values of
        later steps are then outdated and dropped.
        """
        self.records += 1
        step = _number(record.get("step"))
        if step is None or not math.isfinite(step):
            step = float(self.records)
        for key, raw in record.items():
            value = math.nan if raw is None else _number(raw)
            if key == "step" or value is None:
                continue
            series = self._series(key)
            if series is not None:
                if series.steps and step < series.steps[-1]:
                    self._begin_again(step)
                series.put(step, value)

    def _series(self, key: str) -> Series | None:
        if key not in self.series and len(self.series) < MAX_KEYS and len(key) <= MAX_KEY_LENGTH:
            self.series[key] = Series()
        return self.series.get(key)

    def _begin_again(self, step: float) -> None:
        for series in self.series.values():
            series.cut(step)


def read_metrics(data: bytes, *, is_cut: bool = False) -> Metrics:
    """The series in a file's bytes, or in its end (`is_cut`). An incomplete last line does not count as damaged."""
    metrics = Metrics(is_cut=is_cut or len(data) > MAX_BYTES)
    for record in records_of(data, is_cut=is_cut):
        if record is not None:
            metrics.add(record)
        else:
            metrics.damaged += 1
    return metrics


def records_of(data: bytes, *, is_cut: bool = False) -> Iterator[dict[str, Any] | None]:
    """The records of these lines; None for a damaged line."""
    start = max(0, len(data) - MAX_BYTES)
    if is_cut or start > 0:
        start = data.find(b"\n", start) + 1  # skips a part of a line
    while start < len(data):
        end = data.find(b"\n", start)
        is_last = end < 0
        end = len(data) if is_last else end
        line = data[start : min(end, start + MAX_LINE + 1)].strip()
        start = end + 1
        if not line:
            continue
        try:
            record = load_json(line, most=MAX_LINE)
        except InvalidData:
            record = None
        if isinstance(record, dict):
            yield record
        elif not is_last:
            yield None


def _number(value: object) -> float | None:
    """A number as a float, NaN if it is not finite; None for other values."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return math.nan
    return number if math.isfinite(number) else math.nan
