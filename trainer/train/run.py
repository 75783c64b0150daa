"""A training run as one value, and how it ended: what a recipe builds and the loop consumes."""

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
    """What held-out data say of the model."""

    loss: float
    """By which evaluations are compared: less is better."""
    tokens: int
    """That it is the mean over."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What else is recorded, by name."""


@dataclass
class Run:
    """Everything that a training run consists of; a recipe builds it and hands it to `train`."""

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
    """Called with this run and with whether it is asked to stop; None: the loss on held-out data."""
    state: ExtraState | None = None
    """What the recipe keeps in checkpoints."""
    largest_batch: Callable[[Config], Batch] = largest_batch
    flops: Flops = NO_FLOPS
    peak_flops: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    """Goes into every checkpoint's state.json."""
    start_step: int = 0
    sample: Callable[[int, Callable[[], bool]], None] | None = None
    """Called after an evaluation, with the step and whether the run is asked to stop: has the model say something."""
    graphed: GraphedMicroBatches | None = None
    """Runs forward and backward in the place of `loss_fn` where that is worth it."""

    def is_due(self, step: int, *, every: int) -> bool:
        """Whether what is done every so many steps (0: never), and after the last one, is due."""
        return step == self.data.train.total_steps or (every > 0 and step % every == 0)


@dataclass(frozen=True)
class Result:
    """How a run ended: `stopped` when it was asked to before its last step."""

    step: int
    stopped: bool
    eval_loss_first: float | None
    """From before the first step."""
    eval_loss_last: float | None
    """None before there was a later evaluation."""
    eval_loss_best: float | None = None
    eval_step_best: int | None = None
    """0: before the first step."""
    reason: str | None = None
    """Why a run that succeeded ended before its last step."""
    unsaved: Exception | None = None
    """Why its last state is in no checkpoint, though it is exported."""
