"""Curves in a terminal, as lines of text. plotext draws them; it is imported only when there is something to draw."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from deployer.curves.metrics import Series
from deployer.curves.points import Axis, Points, axis_of, pieces, thinned
from deployer.errors import FerryError
from deployer.printable import shown

LEAST_WIDTH, LEAST_HEIGHT = 20, 5
MOST_WIDTH, MOST_HEIGHT = 400, 120
COLOURS = (12, 208, 10, 13, 11, 14, 9, 7)
"""Indices in the terminal's palette, in the order of the curves."""
MARKS = "*+xo#@%="
"""Marks in the order of the curves, used without colours or with only ASCII."""
NOTHING = "no values yet"
_ESCAPE = re.compile(r"\x1b\[[\d;]*m")
_AT_END = re.compile(r"(?: |\x1b\[0m)*\Z")
_IN_ASCII = str.maketrans("┌┐└┘├┤┬┴┼─│", "+++++|+++-|")


def draw_curve(
    curves: Mapping[str, Series | Points],
    width: int,
    height: int,
    *,
    colour: bool = True,
    plain: bool = False,
    whole_x: bool = True,
) -> list[str]:
    """Curves by name with axes: `height` lines of at most `width` columns, including axes and names.

    If there are several curves, lines with their names stand above them. Lines contain colours (SGR) if `colour`, and
    no other escape sequences; `plain`: only ASCII. `whole_x`: x is a count, so ticks are whole numbers. A smaller size
    than LEAST_WIDTH or LEAST_HEIGHT is raised to these. Without finite values the result is the one line NOTHING.
    """
    width = min(max(width, LEAST_WIDTH), MOST_WIDTH)
    height = min(max(height, LEAST_HEIGHT), MOST_HEIGHT)
    points = {name: _points(curve) for name, curve in curves.items()}
    drawn = [(x, y) for part in points.values() for piece in pieces(part) for x, y in piece]
    if not drawn:
        return [NOTHING]
    by_mark = plain or (not colour and len(points) > 1)
    names = _names(list(points), width, colour=colour, by_mark=by_mark) if len(points) > 1 else []
    names = names[: height - LEAST_HEIGHT]
    rows = height - len(names)
    x_axis = axis_of((x for x, _ in drawn), most=max(2, width // 12), whole=whole_x)
    y_axis = axis_of((y for _, y in drawn), most=max(2, rows // 3), margin=0.04)
    text = _drawn(list(points.values()), x_axis, y_axis, (width, rows), colour=colour, by_mark=by_mark)
    lines = [_tidy(line) if colour else _ESCAPE.sub("", line).rstrip() for line in text.rstrip("\n").split("\n")]
    return [*names, *(line.translate(_IN_ASCII) if plain else line for line in lines)]


def _points(curve: Series | Points) -> Points:
    return list(curve) if isinstance(curve, Series) else curve


def _names(names: list[str], width: int, *, colour: bool, by_mark: bool) -> list[str]:
    """The names of the curves with their marks or colours, as many in a line as fit."""
    lines: list[str] = []
    room = 0
    for number, name in enumerate(names):
        label = shown(name)[: width - 2]
        mark = MARKS[number % len(MARKS)] if by_mark else "━"
        text = f"{_in_colour(mark, number) if colour else mark} {label}"
        if lines and len(label) + 4 <= room:
            lines[-1] += f"  {text}"
            room -= len(label) + 4
        else:
            lines.append(text)
            room = width - len(label) - 2
    return lines


def _in_colour(text: str, number: int) -> str:
    return f"\x1b[38;5;{COLOURS[number % len(COLOURS)]}m{text}\x1b[0m"


def _tidy(line: str) -> str:
    """Removes spaces at the end, and colour resets without effect."""
    line = line.removeprefix("\x1b[0m").replace("\x1b[0m\x1b[", "\x1b[")
    return _AT_END.sub("\x1b[0m" if "\x1b[38" in line else "", line, count=1)


def _drawn(
    curves: list[Points], x_axis: Axis, y_axis: Axis, size: tuple[int, int], *, colour: bool, by_mark: bool
) -> str:
    """The output of plotext. It gets only numbers from 0 to 1: a number that is not finite would end the process in its
    C++ code."""
    try:
        import plotext
    except (ImportError, OSError) as error:
        raise FerryError(
            f"plotext, which draws in a terminal, cannot be loaded: {error}", hint="pip install 'plotext>=6.1,<7'"
        ) from None
    plotext.terminal.limit(False, False)
    figure: Any = plotext.figure
    figure.clear()
    figure.theme("simple").plot_size(*size).legend(False)
    figure.axes(False, axis="x", side="upper").axes(False, axis="y", side="right")
    for number, curve in enumerate(curves):
        drawn = list(pieces(thinned(curve, x_axis, 2 * size[0])))
        is_dot = sum(map(len, drawn)) == 1  # a single braille dot is hardly visible
        mark = MARKS[number % len(MARKS)] if by_mark else "•" if is_dot else "braille"
        marker = plotext.marker(mark, pixel=COLOURS[number % len(COLOURS)] if colour else None)
        for piece in drawn:
            xs, ys = [x_axis.place(x) for x, _ in piece], [y_axis.place(y) for _, y in piece]
            figure.draw(figure.signal(xs, ys, marker=marker).lines(True))
    for name, side, axis in (("x", "lower", x_axis), ("y", "left", y_axis)):
        figure.ruler(name, side).lim(0, 1).ticks([axis.place(tick) for tick in axis.ticks], list(axis.labels))
    return str(figure.build().string())
