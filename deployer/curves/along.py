"""The values of a key by step, seconds or tokens. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from deployer.curves.metrics import Metrics, Series

Along = Literal["step", "time", "tokens"]

SINCE_START = ("elapsed_s", "time_s", "wall_s", "elapsed", "_runtime")
"""Keys of programs that write the seconds since their start."""
CLOCK = ("timestamp", "_timestamp", "time")
"""Keys of programs that write the clock time in seconds."""
SO_FAR = ("num_input_tokens_seen", "tokens_seen", "total_tokens", "consumed_tokens", "num_tokens")
"""Keys of programs that write the total tokens so far."""
UNITS = ((3600.0 * 48, 86400.0, "days"), (3600.0 * 2, 3600.0, "hours"), (120.0, 60.0, "minutes"))


@dataclass(frozen=True)
class Scale:
    """The scale of the x axis: values are divided by `unit`, whose name is `name`."""

    name: str
    unit: float = 1.0
    whole: bool = False


def points_along(metrics: Metrics, key: str, along: Along) -> list[tuple[float, float]] | None:
    """The values of a key; None if the metrics contain no time or no tokens."""
    series = metrics.get(key)
    if along == "step":
        return list(series)
    x = _seconds(metrics) if along == "time" else _tokens(metrics)
    if not x.is_drawable:
        return None
    found = []
    for step, value in series:
        place = x.at(step)
        found.append((0.0 if place is None else place, value))
    return found


def scale_of(along: Along, largest: float) -> Scale:
    """The name and the unit of the axis."""
    if along != "time":
        return Scale(along, whole=True)
    return next((Scale(name, unit) for least, unit, name in UNITS if largest > least), Scale("seconds"))


def _seconds(metrics: Metrics) -> Series:
    """Seconds since the start or the first record: from the program's keys, or the trainer's seconds per step added
    up."""
    for key in SINCE_START:
        if metrics.get(key).is_drawable:
            return metrics.get(key)
    for key in CLOCK:
        clock = metrics.get(key)
        if clock.is_drawable:
            first = next(value for value in clock.values if math.isfinite(value))
            return _mapped(clock, first)
    return _added(metrics.get("step_s"), each_step=True)


def _tokens(metrics: Metrics) -> Series:
    for key in SO_FAR:
        if metrics.get(key).is_drawable:
            return metrics.get(key)
    return _added(metrics.get("tokens"), each_step=False)  # the trainer writes the tokens since the last record


def _mapped(series: Series, first: float) -> Series:
    moved = Series()
    for step, value in series:
        moved.put(step, value - first)
    return moved


def _added(series: Series, *, each_step: bool) -> Series:
    """The cumulative sums. `each_step`: a value is the mean over the steps since the last value."""
    total, before = 0.0, 0.0
    sums = Series()
    for step, value in series:
        steps = step - before if each_step else 1.0
        total += value * steps if math.isfinite(value) else 0.0
        before = step
        sums.put(step, total)
    return sums
