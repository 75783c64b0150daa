"""Sizes, errors and lists of names in words."""

from __future__ import annotations

from collections.abc import Sequence

MIB, GIB = 2**20, 2**30


def render_bytes(size: float) -> str:
    """`12.34 GiB`, or in MiB below a tenth of one."""
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / MIB:.2f} MiB"


def first_line(error: BaseException) -> str:
    """`ValueError: no such thing`: an error's kind and the first line of its text that says something, with the next
    one where it only announces that (`backend='inductor' raised:`)."""
    lines = list(filter(None, (line.strip() for line in str(error).splitlines())))
    announced = next((number for number, line in enumerate(lines) if not line.endswith(":")), len(lines))
    text = shortened(" ".join(lines[: announced + 1]), 400)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def shortened(value: object, most: int = 60) -> str:
    """A value of somebody's file as text, cut."""
    text = str(value)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def first_few(names: Sequence[str], count: int) -> str:
    """`a, b and 7 more`: the first `count` names, and how many more there are."""
    more = f" and {len(names) - count:,} more" if len(names) > count else ""
    return ", ".join(shortened(name, 200) for name in names[:count]) + more
