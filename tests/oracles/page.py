"""The table of docs/correctness.md as text."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from datetime import date

from tests.oracles.measure import Measured
from tests.support.ferry import REPO

PAGE = REPO / "docs" / "correctness.md"
BEGIN, END = "<!-- measured: python -m tests.oracles --write -->", "<!-- end of measured -->"


def render_table(measured: Sequence[Measured], *, versions: Mapping[str, str], day: date) -> str:
    """A line for each comparison, below what it was measured with."""
    having = ", ".join(f"{name} {number}" for name, number in versions.items())
    lines = [
        f"Measured on {day:%d %B %Y} on a CPU, one thread a rank, Python {platform.python_version()}, {having}.",
        "",
        "| Ours | Oracle | Input | Tolerance | Difference |",
        "|---|---|---|---|---|",
    ]
    for each in measured:
        held = "" if each.holds else " **beyond**"
        lines.append(f"{row_begin(each)} {each.difference:.2g}{held} |")
    return "\n".join(lines)


def row_begin(each: Measured) -> str:
    """The part of a line that does not change from one measurement to the next."""
    return f"| {each.name} | {each.oracle} | {each.input} | {each.tolerance:g} |"


def with_table(page: str, table: str) -> str:
    """The page with this table between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"{PAGE} has no part between {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{after}"
