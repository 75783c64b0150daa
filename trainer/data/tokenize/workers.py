"""One function over many items, by several processes, in order and in bounded memory."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import islice
from threading import Thread
from typing import Any, Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class Workers(Generic[T, R]):
    """`count` processes that all have `function`, which is sent to each of them once."""

    def __init__(self, function: Callable[[T], R], count: int) -> None:
        # spawned, not forked: this process may have threads and a CUDA context
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(count, mp_context=context, initializer=_start, initargs=(function,))
        self._ahead = 2 * count

    def map(self, items: Iterable[T]) -> Iterator[R]:
        """The function's result for each item, in order; items are read as far ahead as there is work for."""
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which may want what is under way
    Thread(target=_end_with_parent, name="parent", daemon=True).start()
    _function.append(function)


def _end_with_parent() -> None:
    """Of a killed parent nobody would ever get work: the other processes keep the queue open."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _call(item: Any) -> Any:
    return _function[0](item)
