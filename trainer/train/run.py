"""A training run as one value, which a recipe builds and the loop uses; and how a run ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.batch import Batch, LossSum
from trainer.checkpoint.states import ExtraState
from trainer.data.batches.steps import largest_batch
from trainer.data.loader import Data
from trainer.dist import Dist
from trainer.metrics.log import MetricsLog
from trainer.models.figures import NO_FLOPS, Flops
from trainer.parallel.backend import Backend
from trainer.schema import Config
from trainer.train.graphs import GraphedMicroBatches

LossFn = Callable[[nn.Module, Batch], LossSum]


@dataclass(frozen=True)
class Evaluated:
    """The result of an evaluation."""

    loss: float
    """The value by which evaluations are compared; lower is better."""
    tokens: int
    """The number of tokens that the loss is the mean of."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further recorded values, by name."""


@dataclass
class Run:
    """All parts of a training run; a recipe builds it and passes it to `train`."""

    config: Config
    run_dir: Path
    dist: Dist
    backend: Backend
    module: nn.Module
    optimizer: torch.optim.Optimizer
    data: Data
    loss_fn: LossFn
    log: MetricsLog
    evaluate: Callable[[Run, Callable[[], bool]], Evaluated | None] | None = None
    """Called with this run and a function that returns whether to stop; None: the loss on held-out data."""
    state: ExtraState | None = None
    """The recipe's state for checkpoints."""
    largest_batch: Callable[[Config], Batch] = largest_batch
    flops: Flops = NO_FLOPS
    peak_flops: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    """Written into every checkpoint's state.json."""
    start_step: int = 0
    sample: Callable[[int, Callable[[], bool]], None] | None = None
    """Called after an evaluation with the step and a function that returns whether to stop: generates samples."""
    graphed: GraphedMicroBatches | None = None
    """If set, runs forward and backward instead of `loss_fn`."""

    def is_due(self, step: int, *, every: int) -> bool:
        """Whether work that is done every `every` steps (0: never) and after the last step is due."""
        return step == self.data.train.total_steps or (every > 0 and step % every == 0)


@dataclass(frozen=True)
class Result:
    """How a run ended. `stopped`: it was asked to stop before its last step."""

    step: int
    stopped: bool
    eval_loss_first: float | None
    """From before the first step."""
    eval_loss_last: float | None
    """None if there was no later evaluation."""
    eval_loss_best: float | None = None
    eval_step_best: int | None = None
    """0: before the first step."""
    reason: str | None = None
    """Why a run that succeeded ended before its last step."""
    unsaved: Exception | None = None
    """Why the last state is not in a checkpoint, although it is exported."""
