"""Tokenizes rows in order, in this process or in several, with bounded memory."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from threading import Thread
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from trainer.data.rows.messages import KEPT_KEYS, Row
from trainer.data.tokenize.chat import Encoded, encode
from trainer.schema import DataConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SAID_KEYS = {"role", "content", *KEPT_KEYS}
CHUNK_ROWS = 256  # per task of a tokenizing process
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class EncodedRow:
    """A row of source number `source`, tokenized without a cut; `key` is a hash of its content."""

    source: int
    key: int
    document: Encoded


SourceRow = tuple[int, Row]


class RowEncoder:
    """Encodes rows in order; with `data.workers` in that many processes, which start when there are enough rows."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, data: DataConfig) -> None:
        how = {"loss_on": data.loss_on, "system_prompt": data.system_prompt, "turns": data.turns}
        self._one = partial(_encode_row, tokenizer=tokenizer, how=how)
        self._workers = data.workers
        self._processes: Workers[list[SourceRow], list[EncodedRow]] | None = None

    def encode(self, rows: Iterable[SourceRow]) -> Iterator[EncodedRow]:
        """Each row encoded; rows are read ahead only as far as the processes need work."""
        rows = iter(rows)
        first = list(islice(rows, CHUNK_ROWS + 1)) if self._workers else []
        rows = chain(first, rows)
        if len(first) <= CHUNK_ROWS:
            return map(self._one, rows)
        if self._processes is None:
            self._processes = Workers(partial(_encode_chunk, one=self._one), self._workers)
        return chain.from_iterable(self._processes.map(chunks(rows, CHUNK_ROWS)))

    def close(self) -> None:
        """Ends the worker processes."""
        if self._processes is not None:
            self._processes.close()


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
    """A 64-bit hash of a row's content; without its name and without further keys of its messages."""
    said = row.messages
    if any(len(message) > 2 for message in said):
        said = [{key: value for key, value in message.items() if key in SAID_KEYS} for message in said]
    text = json.dumps(said, sort_keys=True)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _encode_row(pair: SourceRow, tokenizer: PreTrainedTokenizerFast, *, how: dict[str, Any]) -> EncodedRow:
    source, row = pair
    return EncodedRow(source, content_key(row), encode(row, tokenizer, **how))


def _encode_chunk(chunk: list[SourceRow], *, one: partial[EncodedRow]) -> list[EncodedRow]:
    return [one(pair) for pair in chunk]


# --- processes -------------------------------------------------------------------------------------------------------


class Workers(Generic[T, R]):
    """`count` processes that call `function`, which is sent to each of them once."""

    def __init__(self, function: Callable[[T], R], count: int) -> None:
        # spawned, not forked: this process may have threads and a CUDA context
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(count, mp_context=context, initializer=_start, initargs=(function,))
        self._ahead = 2 * count

    def map(self, items: Iterable[T]) -> Iterator[R]:
        """The function's result for each item, in order; items are read ahead only as far as needed."""
        waiting: deque[Future[R]] = deque()
        for item in items:
            waiting.append(self._pool.submit(_call, item))
            if len(waiting) > self._ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def close(self) -> None:
        """End the processes, without waiting for them."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def chunks(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """The items, `size` at a time."""
    items = iter(items)
    while chunk := list(islice(items, size)):
        yield chunk


_function: list[Callable[[Any], Any]] = []  # set once in each process


def _start(function: Callable[[Any], Any]) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C; it may still need the work in progress
    Thread(target=_end_with_parent, name="parent", daemon=True).start()
    _function.append(function)


def _end_with_parent() -> None:
    """Exit when the parent has ended: else, after a kill of the parent, the process would wait for work forever,
    because the other processes keep the queue open."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _call(item: Any) -> Any:
    return _function[0](item)
