"""What of the rows nobody reads, and what a chat template leaves out: counted by kind, each with its first row."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import DataError
from trainer.typed import Count, InvalidData, from_json
from trainer.words import first_few

COLUMN, KEY, MARK, LEFT_OUT = "column", "key", "mark", "left out"
"""A column that the schema has no use for; a key of a message that the template does not name; a mark of training
without effect; words of the row that are not in what the template made of it."""

Remark = tuple[str, str]
"""A kind and what it is about."""

MAX_FINDINGS = 50
OTHERS = "others"
SHOWN_COLUMNS = 10


@dataclass(frozen=True)
class Finding:
    """One thing that was found in `rows` rows; `first` is the place of the first of them."""

    kind: str
    what: str
    rows: Count
    first: str


class Findings:
    """Counts remarks on rows, in bounded memory: each row may have columns with other names."""

    def __init__(self, findings: Iterable[Finding] = ()) -> None:
        self._found: dict[Remark, tuple[int, str]] = {}
        for one in findings:
            self._add((one.kind, one.what), one.rows, one.first)

    def add(self, remarks: Iterable[Remark], row_id: str) -> None:
        """Counts a finding of one row."""
        for remark in remarks:
            self._add(remark, 1, row_id)

    def _add(self, remark: Remark, rows: int, first: str) -> None:
        if remark not in self._found and len(self._found) >= MAX_FINDINGS:
            remark = (remark[0], OTHERS)
        before, place = self._found.get(remark, (0, first))
        self._found[remark] = before + rows, place

    def list(self) -> list[Finding]:
        """All findings, in the order found."""
        return [Finding(kind, what, rows, first) for (kind, what), (rows, first) in self._found.items()]


def parse_findings(value: Any, path: Path) -> list[Finding]:
    """What the header of a token file says of the rows that it was made of. DataError when that is nothing of the
    kind: others may have made the file."""
    try:
        return from_json(value, list[Finding])
    except InvalidData as damage:
        hint = "make it anew"
        raise DataError(f"{path.absolute()} is damaged: its account of rows: {damage}", hint=hint) from None


def render_findings(findings: Iterable[Finding]) -> list[str]:
    """A line for all columns, and one for each of the others."""
    findings = list(findings)
    columns = [one for one in findings if one.kind == COLUMN]
    lines = []
    if columns:
        names = first_few([f"{one.what} ({one.rows:,} rows)" for one in columns], SHOWN_COLUMNS)
        lines.append(f"note: columns that are not read: {names}; the first in {columns[0].first}")
    return lines + [_render(one) for one in findings if one.kind != COLUMN]


def _render(one: Finding) -> str:
    said = {
        KEY: "note: the chat template does not read {}",
        MARK: "warning: no effect of {}",
        LEFT_OUT: "warning: the chat template leaves out {}",
    }.get(one.kind, "{}").format(one.what)
    return f"{said}: {one.rows:,} rows, the first is {one.first}"
