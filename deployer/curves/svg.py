"""Curves as inline SVG for an HTML page, which defines the colours; the SVG loads nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from deployer.curves.points import Axis, Points, axis_of, pieces, thinned

WIDTH, HEIGHT = 640, 260
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 12, 40
COLUMNS = 300
FEW = 30
"""Up to this many points have a dot each, with their numbers."""
COLOURS = 8


def svg_chart(curves: Mapping[str, Points], *, x_name: str, title: str, whole_x: bool = True) -> str:
    """One chart. The style of its page must have the classes `chart`, `grid`, `axis` and `c0` to `c7`."""
    drawn = {name: list(pieces(points)) for name, points in curves.items()}
    every = [point for part in drawn.values() for piece in part for point in piece]
    x_axis = axis_of((x for x, _ in every), most=7, whole=whole_x)
    y_axis = axis_of((y for _, y in every), most=6, margin=0.05)
    told = escape(f"{title} by {x_name}")
    lines = [
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{told}">',
        *_axes(x_axis, y_axis, x_name),
    ]
    for number, (name, points) in enumerate(curves.items()):
        lines += _curve(points, x_axis, y_axis, name=name, x_name=x_name, colour=number % COLOURS)
    return "\n".join([*lines, "</svg>"])


def svg_legend(names: Sequence[str]) -> str:
    """The legend with the names of the curves; empty for a single curve."""
    if len(names) < 2:
        return ""
    marks = [f'<span class="c{n % COLOURS}"><i></i>{escape(name)}</span>' for n, name in enumerate(names)]
    return f'<p class="legend">{" ".join(marks)}</p>'


def _axes(x_axis: Axis, y_axis: Axis, x_name: str) -> list[str]:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    found = []
    for tick, label in zip(y_axis.ticks, y_axis.labels, strict=True):
        y = _y(tick, y_axis)
        found.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{right}"/>')
        found.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{escape(label)}</text>')
    for tick, label in zip(x_axis.ticks, x_axis.labels, strict=True):
        x = _x(tick, x_axis)
        found.append(f'<path class="axis" d="M{x:.1f} {bottom}v4"/>')
        found.append(f'<text x="{x:.1f}" y="{bottom + 17}" text-anchor="middle">{escape(label)}</text>')
    found.append(f'<path class="axis" d="M{LEFT} {TOP}V{bottom}H{right}"/>')
    found.append(f'<text x="{right}" y="{HEIGHT - 6}" text-anchor="end">{escape(x_name)}</text>')
    return found


def _curve(points: Points, x_axis: Axis, y_axis: Axis, *, name: str, x_name: str, colour: int) -> list[str]:
    found = []
    parts = list(pieces(thinned(points, x_axis, COLUMNS)))
    for piece in parts:
        places = [f"{_x(x, x_axis):.1f} {_y(y, y_axis):.1f}" for x, y in piece]
        found.append(f'<path class="line c{colour}" d="M{"L".join(places)}"/>')
    if sum(map(len, parts)) <= FEW:
        for x, y in (point for piece in parts for point in piece):
            told = escape(f"{name}: {y:.6g} at {x_name} {_told(x)}")
            place = f'cx="{_x(x, x_axis):.1f}" cy="{_y(y, y_axis):.1f}"'
            found.append(f'<circle class="dot c{colour}" {place} r="2.5"><title>{told}</title></circle>')
    return found


def _told(x: float) -> str:
    return f"{x:,.0f}" if math.isclose(x, round(x), abs_tol=1e-9) else f"{x:.4g}"


def _x(value: float, axis: Axis) -> float:
    return LEFT + axis.place(value) * (WIDTH - LEFT - RIGHT)


def _y(value: float, axis: Axis) -> float:
    return HEIGHT - BOTTOM - axis.place(value) * (HEIGHT - TOP - BOTTOM)
