"""An endless stream of training rows from sources that are never read whole, and where it stands.

Without weights an epoch reads the sources one after another, each as often as its `repeat` says; of a part of a pass it
takes the rows whose content hashes below it. With weights the sources take turns, in proportion, and each begins anew
when it ends. Rows for evaluation, chosen by content hash as well, are passed over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from trainer.data.dataset.documents import KEYS, Source, held_out_share, is_held_out, read_source
from trainer.data.rows.messages import Row
from trainer.data.tokenize.encode import content_key
from trainer.errors import DataError
from trainer.schema import Config


@dataclass(frozen=True)
class Position:
    """How far a stream has been read: `turn` counts the passes of an epoch, the lists are by source.

    `records`: read of the present pass; `taken`: rows given in all.
    """

    epoch: int
    turn: int
    records: tuple[int, ...]
    taken: tuple[int, ...]

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
    """Whole passes, and then the part of one."""
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
    """The rows of a source, over and over."""
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
