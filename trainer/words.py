"""Renders sizes, errors and lists of names as text."""

from __future__ import annotations

from collections.abc import Sequence

MIB, GIB = 2**20, 2**30


def render_bytes(size: float) -> str:
    """`12.34 GiB`; below 0.1 GiB in MiB."""
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / MIB:.2f} MiB"


def first_line(error: BaseException) -> str:
    """`ValueError: no such thing`: an error's type and its first line of text. Lines that end with a colon
    (`backend='inductor' raised:`) only introduce the next line, so they are kept together with it."""
    lines = list(filter(None, (line.strip() for line in str(error).splitlines())))
    announced = next((number for number, line in enumerate(lines) if not line.endswith(":")), len(lines))
    text = shortened(" ".join(lines[: announced + 1]), 400)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def shortened(value: object, most: int = 60) -> str:
    """A value as text of at most `most` characters."""
    text = str(value)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def first_few(names: Sequence[str], count: int) -> str:
    """`a, b and 7 more`: the first `count` names, and the number of the others."""
    more = f" and {len(names) - count:,} more" if len(names) > count else ""
    return ", ".join(shortened(name, 200) for name in names[:count]) + more
