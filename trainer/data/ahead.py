"""The batches of a step, laid out by a thread while the step before is trained on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from trainer.batch import Batch
from trainer.data.batching import Ranks
from trainer.dist import Dist


class Ahead:
    """`take(step)` gives what `build(step)` returns, and has the next step built meanwhile, one at a time.

    On CUDA the batches come in pinned memory, so that the copy to the device is waited for by nobody.
    """

    def __init__(self, build: Callable[[int], list[Batch]], ranks: Ranks) -> None:
        device = ranks.device if isinstance(ranks, Dist) else torch.device("cpu")
        self._build = build
        self._pinned = device.type == "cuda"
        # a thread's current device is the first one unless it says so
        start = (lambda: torch.cuda.set_device(device)) if self._pinned else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches", initializer=start)
        self._next: tuple[int, Future[list[Batch]]] | None = None

    def take(self, step: int, *, total_steps: int) -> list[Batch]:
        """The batches of a step, counted from 0; those of the next one are begun unless it was the last."""
        if self._next is not None and self._next[0] == step:
            batches = self._next[1].result()
        else:
            batches = self._thread.submit(self._made, step).result()
        if step + 1 < total_steps:
            self._next = step + 1, self._thread.submit(self._made, step + 1)
        return batches

    def forget(self) -> None:
        """What has been built is of no use: the data go on at another place."""
        self._next = None

    def close(self) -> None:
        """End the thread once it has finished what it is at; nothing can be taken any more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _made(self, step: int) -> list[Batch]:
        batches = self._build(step)
        return [batch.pin() for batch in batches] if self._pinned else batches
