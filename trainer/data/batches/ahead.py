"""The batches of the next steps, laid out by a thread while others are trained on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from trainer.batch import Batch
from trainer.data.batches.micro_batches import Ranks
from trainer.dist import Dist


class Ahead:
    """`take(step)` gives what `build(step)` returns, and has the `depth` steps after it built meanwhile, one at a time.

    Several, so that a step of a few milliseconds does not wait for a thread that came late once. On CUDA the batches
    come in pinned memory, so that the copy to the device is waited for by nobody.
    """

    def __init__(self, build: Callable[[int], list[Batch]], ranks: Ranks, *, depth: int = 1) -> None:
        device = ranks.device if isinstance(ranks, Dist) else torch.device("cpu")
        self._build = build
        self._depth = depth
        self._pinned = device.type == "cuda"
        # a thread's current device is the first one unless it says so
        start = (lambda: torch.cuda.set_device(device)) if self._pinned else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches", initializer=start)
        self._coming: deque[tuple[int, Future[list[Batch]]]] = deque()  # neighbouring steps

    def take(self, step: int, *, total_steps: int) -> list[Batch]:
        """The batches of a step, counted from 0; those of the next ones are begun, up to the last."""
        if not self._coming or self._coming[0][0] != step:
            self.forget()
            self._begin(step)
        _, batches = self._coming.popleft()
        newest = self._coming[-1][0] if self._coming else step
        for later in range(newest + 1, min(step + self._depth + 1, total_steps)):
            self._begin(later)
        return batches.result()

    def forget(self) -> None:
        """What has been built is of no use: the data go on at another place."""
        while self._coming:
            self._coming.popleft()[1].cancel()

    def close(self) -> None:
        """End the thread once it has finished what it is at; nothing can be taken any more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _begin(self, step: int) -> None:
        self._coming.append((step, self._thread.submit(self._made, step)))

    def _made(self, step: int) -> list[Batch]:
        batches = self._build(step)
        return [batch.pin() for batch in batches] if self._pinned else batches
