"""Prepares points for a drawing: smooths and thins them, and makes axes. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

Points = Sequence[tuple[float, float]]
"""Pairs of x and y, in the order of x. A y that is not finite is a gap."""
LARGEST = 1e300
"""Larger numbers cannot be drawn."""


@dataclass(frozen=True)
class Axis:
    """The range of the drawn values, with ticks and their labels."""

    low: float
    high: float
    ticks: tuple[float, ...]
    labels: tuple[str, ...]

    def place(self, value: float) -> float:
        """The position of a value between the limits, from 0 to 1."""
        return min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))


def axis_of(values: Iterable[float], *, most: int, whole: bool = False, margin: float = 0.0) -> Axis:
    """An axis over all finite values, with about `most` ticks. `whole`: ticks only at whole numbers; `margin`: fraction
    of the range that stays free at each end."""
    drawn = [value for value in values if _is_drawn(value)]
    low, high = (min(drawn), max(drawn)) if drawn else (0.0, 1.0)
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # all values are equal within the precision of an axis
        room = abs(low) * 0.1 or 1.0
        ticks = [low]
    else:
        room = (high - low) * margin
        ticks = _ticks(low - room, high + room, most=most, whole=whole)
    return Axis(low - room, high + room, tuple(ticks), tuple(_labels(ticks)))


def _is_drawn(value: float) -> bool:
    return abs(value) <= LARGEST  # false for NaN too


def _ticks(low: float, high: float, *, most: int, whole: bool) -> list[float]:
    """Round values in the range."""
    rough = (high - low) / max(1, most)
    if rough < 1 / LARGEST:
        return [low, high]
    scale = 10.0 ** math.floor(math.log10(rough))
    ticks = [low, high]
    for factor in (1, 2, 5, 10, 20):
        step = max(1.0, factor * scale) if whole else factor * scale
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first > 20:
            continue
        if last - first < 1:
            break  # a single tick is useless: keep the former ones, even if too many
        ticks = [number * step for number in range(first, last + 1)]
        if len(ticks) <= most:
            break
    return ticks


def _labels(ticks: Sequence[float]) -> list[str]:
    """The ticks as text, with enough digits to distinguish them."""
    largest = max(map(abs, ticks), default=0.0)
    step = min((b - a for a, b in pairwise(ticks)), default=largest)
    if largest == 0.0 or not step > 0:
        return [_short(tick) for tick in ticks]
    if largest >= 1e4 and step >= 1000:
        return [_short(tick) for tick in ticks]
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    if largest < 1e-3 or largest >= 1e6:
        digits = max(0, math.floor(math.log10(largest) + 1e-9) + decimals) if largest < 1e-3 else 3
        return ["0" if tick == 0 else _without_zeros(f"{tick:.{digits}e}") for tick in ticks]
    return [f"{tick:,.{min(decimals, 6)}f}" for tick in ticks]


def _short(value: float) -> str:
    """`12k`, `4.5M`."""
    for size, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{suffix}" if abs(value) < 1e15 else f"{value:.2e}"
    return f"{value:.4g}"


def _without_zeros(text: str) -> str:
    """`2e-4` for `2.0e-04`."""
    mantissa, _, exponent = text.partition("e")
    mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
    return f"{mantissa}e{int(exponent)}"


def smoothed(points: Points, window: int) -> list[tuple[float, float]]:
    """Replaces each y by the mean of the last `window` finite values. A gap stays a gap."""
    if window <= 1:
        return list(points)
    recent: list[float] = []
    found = []
    for x, y in points:
        if math.isfinite(y):
            recent = [*recent[1 - window :], y]
            y = math.fsum(value / len(recent) for value in recent)
        found.append((x, y))
    return found


def thinned(points: Points, axis: Axis, buckets: int) -> list[tuple[float, float]]:
    """The first, lowest, highest and last point in each of `buckets` parts of the axis, which is all that a drawing
    with that many columns can show. One gap of each part is kept too."""
    if len(points) <= 4 * buckets:
        return list(points)
    found: list[tuple[float, float]] = []
    for bucket in _buckets(points, axis, buckets):
        finite = [n for n, (_, y) in enumerate(bucket) if math.isfinite(y)]
        kept = {0, len(bucket) - 1}
        if finite:
            kept |= {min(finite, key=lambda n: bucket[n][1]), max(finite, key=lambda n: bucket[n][1])}
        gap = next((n for n in range(len(bucket)) if not math.isfinite(bucket[n][1])), None)
        kept |= {gap} if gap is not None else set()
        found += [bucket[n] for n in sorted(kept)]
    return found


def _buckets(points: Points, axis: Axis, buckets: int) -> Iterator[Points]:
    start = 0
    here = _bucket(points[0][0], axis, buckets)
    for number, (x, _) in enumerate(points):
        there = _bucket(x, axis, buckets)
        if there != here:
            yield points[start:number]
            start, here = number, there
    yield points[start:]


def _bucket(x: float, axis: Axis, buckets: int) -> int:
    return int(axis.place(x) * buckets)


def pieces(points: Points) -> Iterator[list[tuple[float, float]]]:
    """The sequences of points between gaps."""
    piece: list[tuple[float, float]] = []
    for x, y in points:
        if _is_drawn(x) and _is_drawn(y):
            piece.append((x, y))
        elif piece:
            yield piece
            piece = []
    if piece:
        yield piece
