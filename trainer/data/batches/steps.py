"""The loop's interface to training data, streamed or not; and a thread that prepares the next steps' batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from trainer.batch import Batch
from trainer.config.batch import BatchRules
from trainer.data.batches.micro_batches import Ranks
from trainer.dist import Dist
from trainer.schema import Config
from trainer.typed import Count


class Loader(Protocol):
    """Micro-batches by optimizer step, counted from 0; the same rows whatever ranks there are."""

    global_batch_size: int
    """Rows per step over all ranks."""

    @property
    def steps_per_epoch(self) -> float | None:
        """Steps of the first epoch; None if not known."""

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""

    def epoch_at(self, step: int) -> float:
        """Passes over the data that `step` steps make."""

    def step_batches(self, step: int) -> list[Batch]:
        """This rank's micro-batches of `step`, equally many on every rank."""

    def take_notes(self) -> list[str]:
        """Notes for the user about the data since the last call."""

    def close(self) -> None:
        """End what prepares the next batches; no step can be asked for any more."""

    def rank_documents(self, step: int, rank: int) -> list[str]:
        """The IDs of the conversations that one rank trains on in a step; empty if they are not in memory any more."""

    def state_dict(self, step: int) -> dict[str, Any]:
        """The position after `step` steps, the same on every rank."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position. Raises DataError if it is of other data, InvalidData if it is not a position."""

    def fingerprint(self) -> str:
        """Changes with the order or the content of the rows."""


@dataclass(frozen=True)
class DataPosition:
    """A position as a checkpoint keeps it."""

    step: Count
    row: Count
    fingerprint: str


def global_batch_size(config: Config, world_size: int) -> int:
    """Rows per optimizer step over all ranks."""
    train = config.train
    return train.global_batch_size or train.micro_batch_size * (train.grad_accum_steps or 1) * world_size


def micro_batches(config: Config, world_size: int) -> int:
    """Forwards of each rank in an optimizer step; with a token budget the rows decide, and two stand for several."""
    train = config.train
    if train.micro_batch_tokens is not None:
        return 2
    if train.grad_accum_steps is not None:
        return train.grad_accum_steps
    if train.global_batch_size is None:
        return 1
    return -(-train.global_batch_size // (world_size * train.micro_batch_size))


def largest_batch(config: Config) -> Batch:
    """The micro-batch that takes most memory: full rows of one document each, every token but the last a target."""
    rules = BatchRules.of(config)
    length = rules.padded(rules.seq_len)
    tokens = torch.zeros(rules.rows, length, dtype=torch.int64)
    return Batch(tokens, tokens.clone(), torch.arange(length).repeat(rules.rows, 1), torch.zeros_like(tokens))


class Ahead:
    """`take(step)` returns the result of `build(step)`; a thread builds the next `depth` steps, one at a time.

    Several, so that a step of a few milliseconds does not wait if the thread is late once. On CUDA the batches are in
    pinned memory, so that the host does not wait for the copy to the device.
    """

    def __init__(self, build: Callable[[int], list[Batch]], ranks: Ranks, *, depth: int = 1) -> None:
        device = ranks.device if isinstance(ranks, Dist) else torch.device("cpu")
        self._build = build
        self._depth = depth
        self._pinned = device.type == "cuda"
        # a new thread's current device is the first GPU
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
        """Discard the prepared batches, because the data continues at another position."""
        while self._coming:
            self._coming.popleft()[1].cancel()

    def close(self) -> None:
        """End the thread after its current work. Nothing can be taken after this."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _begin(self, step: int) -> None:
        self._coming.append((step, self._thread.submit(self._made, step)))

    def _made(self, step: int) -> list[Batch]:
        batches = self._build(step)
        return [batch.pin() for batch in batches] if self._pinned else batches
