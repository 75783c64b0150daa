"""What the loop asks of training data, whether it is all at hand or comes as a stream."""

from __future__ import annotations

from typing import Any, Protocol

from trainer.batch import Batch
from trainer.schema import Config


class Loader(Protocol):
    """Micro-batches by optimizer step, counted from 0; the same rows whatever ranks there are."""

    global_batch_size: int
    """Rows per step over all ranks."""

    @property
    def steps_per_epoch(self) -> float | None:
        """Of the first epoch; None where nobody has counted it."""

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the run."""

    def epoch_at(self, step: int) -> float:
        """Passes over the data that `step` steps make."""

    def step_batches(self, step: int) -> list[Batch]:
        """This rank's micro-batches of `step`, equally many on every rank."""

    def take_notes(self) -> list[str]:
        """What was met in the data since the last call, for the user."""

    def close(self) -> None:
        """End what prepares the next batches; no step can be asked for any more."""

    def rank_documents(self, step: int, rank: int) -> list[str]:
        """The ids of the conversations that one rank trains on in a step; none where they are not at hand any more."""

    def state_dict(self, step: int) -> dict[str, Any]:
        """The position after `step` steps, the same on every rank."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on at the position; DataError when it is one of other data."""

    def fingerprint(self) -> str:
        """Changes with the order or the content of the rows."""


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
