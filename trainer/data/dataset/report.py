"""What became of the rows that were read, for people and for records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from trainer.data.rows.findings import Finding, render_findings
from trainer.words import first_few

SHOWN_IDS = 5


@dataclass(frozen=True)
class SourceShare:
    """What one source gives to an epoch: `rows` of it can be used, and `documents` and `tokens` are an epoch's."""

    path: str
    rows: int
    documents: int
    tokens: int
    asked: float | None
    """The share of the epoch's documents that the config asks for; None for held-out rows, which have no such share."""
    got: float
    """The source's actual share of the epoch's documents."""
    token_share: float

    def render(self, noun: str) -> str:
        got = f"{self.tokens:,} tokens: {self.got:.1%} of the documents, {self.token_share:.1%} of the tokens"
        if self.asked is None:
            return f"{self.path}: {self.documents:,} {noun}, {got}"
        asked = f"(asked: {self.asked:.1%} of the documents)"
        return f"{self.path}: {self.rows:,} {noun}; an epoch has {self.documents:,}, {got} {asked}"


@dataclass
class SplitReport:
    """What became of the rows of one split; `dropped` maps each reason to the ids of its rows."""

    name: str
    rows_read: int = 0
    rows_kept: int = 0
    dropped: dict[str, list[str]] = field(default_factory=dict)
    truncated: list[str] = field(default_factory=list)
    tokens: int = 0
    """Tokens of the first epoch, like `target_tokens`; without weights every epoch has the same number."""
    target_tokens: int = 0
    packed_rows: int = 0
    padding_share: float = 0.0
    duplicates: int = 0
    """The number of rows with the same content as an earlier one."""
    sources: list[SourceShare] = field(default_factory=list)
    """The shares, if there is a mixture of several sources."""
    noun: str = "conversations"
    part: str = "conversations"
    """What is read, and what is laid into rows."""

    def render(self) -> list[str]:
        """A few lines for people."""
        lines = [
            f"{self.name}: {self.rows_kept:,} of {self.rows_read:,} {self.noun}, {self.tokens:,} tokens "
            f"({self.target_tokens:,} targets) in {self.packed_rows:,} rows, "
            f"{self.padding_share:.1%} padding"
        ]
        lines += [f"{self.name}: {source.render(self.part)}" for source in self.sources]
        for reason, ids in self.dropped.items():
            lines.append(f"{self.name}: {len(ids):,} dropped, {reason}: {some(ids)}")
        if self.truncated:
            lines.append(f"{self.name}: {len(self.truncated):,} cut to seq_len: {some(self.truncated)}")
        if self.duplicates:
            lines.append(f"{self.name}: {self.duplicates:,} {self.noun} repeat an earlier one word for word")
        return lines


@dataclass(frozen=True)
class DataReport:
    """What was read, kept and dropped; `eval` is None without held-out rows."""

    train: SplitReport
    eval: SplitReport | None
    seconds: float
    """From the first file to the last token."""
    notes: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    """The parts of the rows that are in no document, for training and evaluation together."""

    def render(self) -> list[str]:
        """A few lines for people."""
        held_out = self.eval.render() if self.eval else ["eval: no held-out rows"]
        told = [*self.notes, *render_findings(self.findings)]
        return [*self.train.render(), *held_out, f"data: read and tokenized in {self.seconds:.1f} s", *told]


def some(ids: Sequence[str]) -> str:
    """The first few of the ids, and how many more there are."""
    return first_few(ids, SHOWN_IDS)
