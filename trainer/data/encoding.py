"""Rows become tokens, in order and one after another, by this process or by several, in bounded memory."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING

from trainer.data.chat import Encoded, encode
from trainer.data.messages import Row
from trainer.schema import DataConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CHUNK_ROWS = 256  # per task of a tokenizing process


@dataclass(frozen=True)
class EncodedRow:
    """A row of source number `source`, tokenized whole; `key` is a hash of what it says."""

    source: int
    key: int
    document: Encoded


SourceRow = tuple[int, Row]


class RowEncoder:
    """Encodes rows in order; by `data.workers` processes when there are any, which start with the first real work."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, data: DataConfig) -> None:
        self._one = partial(_encode_row, tokenizer=tokenizer, loss_on=data.loss_on, system_prompt=data.system_prompt)
        self._workers = data.workers
        self._pool: ProcessPoolExecutor | None = None

    def encode(self, rows: Iterable[SourceRow]) -> Iterator[EncodedRow]:
        """Each row encoded, read as far ahead as the processes have work for."""
        rows = iter(rows)
        first = list(islice(rows, CHUNK_ROWS + 1)) if self._workers else []
        rows = chain(first, rows)
        if len(first) <= CHUNK_ROWS:
            return map(self._one, rows)
        if self._pool is None:
            # spawned, not forked: the training process may have threads and a CUDA context
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(
                self._workers, mp_context=context, initializer=_start_worker, initargs=(self._one,)
            )
        return _encode_in_processes(rows, self._pool, ahead=2 * self._workers)

    def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


def encode_rows(
    rows: Iterable[SourceRow], tokenizer: PreTrainedTokenizerFast, data: DataConfig
) -> Iterator[EncodedRow]:
    """Each row encoded, in order."""
    encoder = RowEncoder(tokenizer, data)
    try:
        yield from encoder.encode(rows)
    finally:
        encoder.close()


def content_key(row: Row) -> int:
    """64 bits that change with what a row says, not with its name."""
    text = json.dumps(row.messages, sort_keys=True)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _encode_row(
    pair: SourceRow, tokenizer: PreTrainedTokenizerFast, *, loss_on: str, system_prompt: str | None
) -> EncodedRow:
    source, row = pair
    document = encode(row, tokenizer, loss_on=loss_on, system_prompt=system_prompt)
    return EncodedRow(source, content_key(row), document)


def _encode_in_processes(rows: Iterator[SourceRow], pool: ProcessPoolExecutor, *, ahead: int) -> Iterator[EncodedRow]:
    waiting: deque[Future[list[EncodedRow]]] = deque()
    while (chunk := list(islice(rows, CHUNK_ROWS))) or waiting:
        if chunk:
            waiting.append(pool.submit(_encode_in_worker, chunk))
        if len(waiting) > ahead or not chunk:
            yield from waiting.popleft().result()


_worker: list[partial[EncodedRow]] = []  # set once in each tokenizing process


def _start_worker(one: partial[EncodedRow]) -> None:
    _worker.append(one)


def _encode_in_worker(chunk: list[SourceRow]) -> list[EncodedRow]:
    return [_worker[0](pair) for pair in chunk]
