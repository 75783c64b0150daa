"""An endless stream of rows from sources that are never read whole; its windows, each tokenized, shuffled and packed.

Without weights an epoch reads the sources one after another, each `repeat` times; for a fraction of a pass it takes
that share of the rows, those with the highest content hashes. With weights the sources take turns, in proportion, and
each starts again when it ends. Rows for evaluation, those with the lowest content hashes, are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.data.batches.packing import Plan
from trainer.data.dataset.documents import KEYS, Source, held_out_share, is_held_out, read_source
from trainer.data.dataset.order import generator, lay_out
from trainer.data.dataset.report import some
from trainer.data.dataset.store import fit
from trainer.data.rows.findings import Finding, Findings
from trainer.data.rows.messages import Row
from trainer.data.rows.sources import identify
from trainer.data.tokenize.chat import Encoded
from trainer.data.tokenize.encode import RowEncoder, content_key
from trainer.errors import DataError
from trainer.schema import Config
from trainer.typed import Count

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

EMPTY_WINDOWS = 20
"""After as many rows as this number of windows without a usable one, the source counts as having no data."""


@dataclass(frozen=True)
class Position:
    """How far a stream has been read: `turn` counts the passes of an epoch, the lists are by source.

    `records`: read of the present pass; `taken`: rows given in all.
    """

    epoch: Count
    turn: Count
    records: tuple[Count, ...]
    taken: tuple[Count, ...]

    @classmethod
    def start(cls, count: int) -> Position:
        return cls(0, 0, (0,) * count, (0,) * count)


@dataclass(frozen=True)
class StreamRow:
    """The next row, and the position behind it; without a row it is the end of an epoch."""

    after: Position
    source: int = 0
    row: Row | None = None


def stream_rows(config: Config, sources: Sequence[Source], start: Position) -> Iterator[StreamRow]:
    """The rows from `start` on, without end; records before it are read but not tokenized."""
    if any(source.settings.weight is not None for source in sources):
        return _in_proportion(config, sources, start)
    return _one_after_another(config, sources, start)


def _one_after_another(config: Config, sources: Sequence[Source], position: Position) -> Iterator[StreamRow]:
    passes = [(index, part) for index, source in enumerate(sources) for part in _parts(source.settings.repeat)]
    while True:
        for turn in range(position.turn, len(passes)):
            index, part = passes[turn]
            position = replace(position, turn=turn)
            for records, row in _read(config, sources[index], position.records[index]):
                position = replace(position, records=_with(position.records, index, records))
                if row is not None and content_key(row) >= (1 - part) * KEYS:
                    yield StreamRow(position, index, row)
            position = replace(position, records=_with(position.records, index, 0))
        position = replace(Position.start(len(sources)), epoch=position.epoch + 1)
        yield StreamRow(position)


def _parts(repeat: float) -> list[float]:
    """The whole passes, then a fraction of one if there is any."""
    return [1.0] * int(repeat) + ([repeat % 1] if repeat % 1 else [])


def _in_proportion(config: Config, sources: Sequence[Source], position: Position) -> Iterator[StreamRow]:
    weights = [source.settings.weight or 0.0 for source in sources]
    readers = [_read_again(config, source, skip) for source, skip in zip(sources, position.records, strict=True)]
    while True:
        index = min(range(len(sources)), key=lambda i: (position.taken[i] + 0.5) / weights[i])
        records, row = next(readers[index])
        taken = _with(position.taken, index, position.taken[index] + 1)
        position = replace(position, records=_with(position.records, index, records), taken=taken)
        yield StreamRow(position, index, row)


def _read_again(config: Config, source: Source, skip: int) -> Iterator[tuple[int, Row]]:
    """The rows of a source, repeated without end."""
    while True:
        found = False
        for records, row in _read(config, source, skip):
            if row is not None:
                found = True
                yield records, row
        if not found and skip == 0:
            raise DataError(f"{source.path} has no row to train on", hint="lower data.eval_fraction, or drop it")
        skip = 0


def _read(config: Config, source: Source, skip: int) -> Iterator[tuple[int, Row | None]]:
    """(records read so far, row) of one pass from record `skip` on; None for a row that is held out."""
    divided = held_out_share(config, source) > 0
    for number, row in enumerate(read_source(config, source), start=1):
        if number > skip:
            yield number, None if divided and is_held_out(row, config) else row


def _with(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])


# --- windows ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WindowStart:
    """Where a window begins: `number` within its epoch, `row` in the endless sequence of the run's rows."""

    number: Count
    row: Count
    position: Position

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Window:
    """Documents in the order of the stream, their rows, and what was left out on the way."""

    start: WindowStart
    docs: list[Encoded]
    rows: Plan
    next: WindowStart
    rows_read: int
    truncated: int
    dropped: dict[str, list[str]]
    findings: list[Finding]

    @property
    def end_row(self) -> int:
        return self.next.row

    @property
    def tokens(self) -> int:
        return sum(len(doc.ids) for doc in self.docs)

    def describe_losses(self) -> list[str]:
        """A line for each reason for which rows were dropped."""
        return [f"{len(ids):,} dropped, {reason}: {some(ids)}" for reason, ids in self.dropped.items()]


class WindowMaker:
    """Makes consecutive windows; if a start is not the end of the last window, it reads the sources again.

    Raises DataError if a file has changed since the run began.
    """

    def __init__(self, config: Config, sources: Sequence[Source], tokenizer: PreTrainedTokenizerFast) -> None:
        self._config = config
        self._sources = sources
        self._encoder = RowEncoder(tokenizer, config.data)
        self._identities = [identify(source.path, source.split) for source in sources]
        self._patience = EMPTY_WINDOWS * config.data.stream_window
        self._stream: Iterator[StreamRow] = iter(())
        self._at: Position | None = None

    @property
    def identities(self) -> list[Any]:
        """Values that change with the content of a source."""
        return self._identities

    def make(self, start: WindowStart) -> Window:
        """The documents from `start` on: data.stream_window of them, or fewer at the end of an epoch."""
        self._check_sources()
        if self._at != start.position:
            self._stream = stream_rows(self._config, self._sources, start.position)
        window = self._fill(start)
        self._at = window.next.position
        if not window.docs and (window.next.number == start.number == 0 or window.rows_read >= self._patience):
            reasons = "; ".join(window.describe_losses()) or "nothing was read"
            raise DataError(
                f"none of the {window.rows_read} conversations read can be used: {reasons}",
                where="data.train",
                hint="raise data.seq_len, set data.loss_on=all, or look at what the chat template makes of them",
            )
        return window

    def close(self) -> None:
        """End the tokenizing processes."""
        self._encoder.close()

    def _fill(self, start: WindowStart) -> Window:
        docs: list[Encoded] = []
        dropped: dict[str, list[str]] = {}
        findings = Findings()
        read = truncated = 0
        last, over = start.position, False
        size = self._config.data.stream_window
        while len(docs) < size and not over and (docs or read < self._patience):
            items = []
            for item in islice(self._stream, size - len(docs)):
                last, over = item.after, item.row is None
                if over:
                    break
                items.append(item)
            read += len(items)
            pairs = ((item.source, item.row) for item in items if item.row is not None)
            for encoded in self._encoder.encode(pairs):
                findings.add(encoded.document.remarks, encoded.document.id)
                doc, reason = fit(encoded.document, self._config.data)
                if doc is None:
                    dropped.setdefault(reason, []).append(encoded.document.id)
                else:
                    docs.append(doc)
                    truncated += len(doc.ids) < len(encoded.document.ids)
        rows = self._lay_out(docs, start)
        following = WindowStart(0 if over else start.number + 1, start.row + len(rows), last)
        return Window(start, docs, rows, following, read, truncated, dropped, findings.list())

    def _lay_out(self, docs: list[Encoded], start: WindowStart) -> Plan:
        # the first window of an epoch has the same order as data that is not streamed
        which = (start.position.epoch, start.number) if start.number else (start.position.epoch,)
        random = generator(self._config.train.seed, *which)
        order = list(range(len(docs)))
        if self._config.data.shuffle:
            order = random.permutation(len(docs)).tolist()
        return lay_out([len(doc.ids) for doc in docs], order, random, self._config)

    def _check_sources(self) -> None:
        for source, before in zip(self._sources, self._identities, strict=True):
            now = identify(source.path, source.split)
            if now != before:
                changed = [_change(old, new) for old, new in zip(before, now, strict=False) if old != new]
                what = "; ".join(changed) or "files were added or removed"
                raise DataError(
                    f"{source.path} has changed while it was trained on: {what}",
                    where="data.train",
                    hint="put it back as it was, with its time (`cp -p`), and start the run again in its run folder;"
                    " without data.streaming a run keeps its own copy of the tokens",
                )


def _change(before: Any, now: Any) -> str:
    """How one file of a source has changed, from its values in `identify`."""
    if not isinstance(before, list) or before[:1] != now[:1]:
        return f"{before} -> {now}"
    name = Path(before[0]).name
    return f"{name}: {before[1]:,} -> {now[1]:,} bytes" if before[1] != now[1] else f"the time of {name}"


def first_window(sources: Sequence[Source]) -> WindowStart:
    """The beginning of the stream."""
    return WindowStart(0, 0, Position.start(len(sources)))
