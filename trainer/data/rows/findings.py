"""Findings: parts of rows that are not read or that a chat template leaves out. Counted by kind, with the first row."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import DataError
from trainer.typed import Count, InvalidData, from_json
from trainer.words import first_few

COLUMN, KEY, MARK, LEFT_OUT = "column", "key", "mark", "left out"
"""A column that the schema does not use; a key of a message that the template does not name; a target mark without
effect; words of the row that are missing in the template's output."""

Remark = tuple[str, str]
"""The kind of a finding, and its subject."""

MAX_FINDINGS = 50
OTHERS = "others"
SHOWN_COLUMNS = 10


@dataclass(frozen=True)
class Finding:
    """One finding in `rows` rows; `first` is the place of the first of them."""

    kind: str
    what: str
    rows: Count
    first: str


class Findings:
    """Counts remarks on rows, in bounded memory, because each row may have columns with new names."""

    def __init__(self, findings: Iterable[Finding] = ()) -> None:
        self._found: dict[Remark, tuple[int, str]] = {}
        for one in findings:
            self._add((one.kind, one.what), one.rows, one.first)

    def add(self, remarks: Iterable[Remark], row_id: str) -> None:
        """Count one row's remarks."""
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
    """The findings in a token file's header. Raises DataError if they are invalid: the file may be untrusted."""
    try:
        return from_json(value, list[Finding])
    except InvalidData as damage:
        hint = "make it anew"
        raise DataError(f"{path.absolute()} is damaged: its account of rows: {damage}", hint=hint) from None


def render_findings(findings: Iterable[Finding]) -> list[str]:
    """One line for all columns, and one for each other finding."""
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
