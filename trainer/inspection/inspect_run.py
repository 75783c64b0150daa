"""Inspects a planned run in one process on the CPU: its data, its plan, its memory, its schedule.

No weights are read or created: the model stays on the meta device, planned for the configured number of ranks.
"""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch

from trainer.config.load import config_notes, num_processes
from trainer.config.train import length_notes, warmup_steps
from trainer.data.dataset.report import DataReport
from trainer.data.loader import Data
from trainer.data.tokenize.tokenizer import quiet_transformers, settle_offline
from trainer.dist import Dist
from trainer.inspection.samples import Sample, read_samples
from trainer.memory.estimate import MemoryEstimate, Saving, estimate_memory, savings
from trainer.memory.fitting import Fit, fit_into
from trainer.memory.plans import Choice
from trainer.models.build import build_model
from trainer.models.lora import render_lora
from trainer.models.protocol import Shape
from trainer.optim.build import parameter_groups, render_groups
from trainer.optim.schedules import lr_multiplier, peak_learning_rate, render_lr_scaling
from trainer.parallel.float8_choice import foresee_float8
from trainer.parallel.plan import WrapPlan
from trainer.parallel.wrapping import plan_wrapping
from trainer.schema import JOB_ID_ENV, Config
from trainer.train.plan_log import ParameterSummary, summarize
from trainer.train.recipe import Recipe, make_recipe, read_basis
from trainer.train.resolve_defaults import foresee
from trainer.words import GIB

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


DEFAULT_CARD_GIB = 80


@dataclass(frozen=True)
class Schedule:
    """The length of the run, and its learning rate."""

    steps: int
    warmup_steps: int
    rows_per_step: int
    epochs: float | None
    """None for a stream, because its length is not known."""
    tokens: int
    """Tokens that the model sees in total, without padding, estimated from its first epoch."""
    lr_first: float
    lr_peak: float
    lr_last: float


@dataclass(frozen=True)
class Inspection:
    """Everything that is known before the first step."""

    samples: list[Sample]
    data: DataReport
    parameters: ParameterSummary
    plan: WrapPlan
    """For the configured number of ranks."""
    float8: str | None
    """Whether products are in float8, as far as is known without the run's GPUs; None: not requested."""
    memory: MemoryEstimate
    """With the chosen plan for memory."""
    plans: Choice | None
    """For a card of the given size; None: no plan is chosen (on the CPU, or with parallel.memory manual)."""
    savings: list[Saving]
    schedule: Schedule
    rates: list[str]
    """Learning rates that differ from the schedule's, and why."""
    notes: list[str]


def inspect_run(
    config: Config, *, samples: int, card_gib: float | None = None, recipe: Recipe | None = None
) -> Inspection:
    """Inspect a run as configured. Raises ConfigError, DataError and ModelError as the run itself would.

    `card_gib`: memory of the GPU into which the run must fit; None: that of this machine's first GPU, else 80.
    `recipe`: None for the config's recipe.
    """
    settle_offline(config)
    quiet_transformers()
    resolved = foresee(config)
    config = resolved.config
    alone = Dist(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"))
    ranks = Dist(rank=0, local_rank=0, world_size=num_processes(config), device=torch.device("cpu"))
    recipe = recipe or make_recipe(config)
    basis = read_basis(recipe, config, alone, weights=False)
    shape = basis.shape
    fit = _fit(config, shape, ranks.world_size, card_gib)
    given, config = config, fit.config
    model = build_model(config, shape)
    plan = plan_wrapping(model, config, ranks.world_size)
    with (
        TemporaryDirectory() as scratch,  # for the tokens, which a run stores in its folder
        closing(recipe.data(config, ranks, basis, run_dir=Path(scratch))) as data,
    ):
        shown = _samples(data, basis.tokenizer, samples)
    return Inspection(
        samples=shown,
        data=data.report,
        parameters=summarize(model),
        plan=plan,
        float8=foresee_float8(model, config),
        memory=estimate_memory(shape, config, world_size=ranks.world_size),
        plans=fit.choice,
        savings=savings(shape, config, world_size=ranks.world_size),
        schedule=plan_schedule(config, data),
        rates=[
            *render_lora(model),
            *render_groups(parameter_groups(model.named_parameters(), config.optim)),
            *render_lr_scaling(config.optim, data.train.global_batch_size),
        ],
        notes=[
            *config_notes(given, backend=plan.backend, deployed=JOB_ID_ENV in os.environ),
            *length_notes(config, data.train.total_steps),
            *resolved.lines,
        ],
    )


def _fit(config: Config, shape: Shape, world_size: int, card_gib: float | None) -> Fit:
    if config.target.device == "cpu" or config.parallel.memory == "manual":
        return Fit(config)
    return fit_into(config, shape, free=_card_bytes(card_gib), world_size=world_size)


def _card_bytes(card_gib: float | None) -> int:
    if card_gib is None and torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(0).total_memory)
    return int((card_gib or DEFAULT_CARD_GIB) * GIB)


def _samples(data: Data, tokenizer: PreTrainedTokenizerFast, count: int) -> list[Sample]:
    """The first rows of rank 0, from as many steps as needed."""
    found: list[Sample] = []
    for step in range(data.train.total_steps):
        if len(found) == count:
            break
        found += read_samples(data.train.step_batches(step), tokenizer, count=count - len(found))
    return found


def plan_schedule(config: Config, data: Data) -> Schedule:
    """The length of the run and the learning rates of its steps."""
    loader, report = data.train, data.report.train
    steps = loader.total_steps
    multiplier = lr_multiplier(config.optim, steps)
    peak = peak_learning_rate(config.optim, loader.global_batch_size)
    warmup = warmup_steps(config.optim, steps)
    highest = min(warmup, steps - 1)  # the rate rises until this step, and never after it
    tokens_per_row = report.tokens / max(1, report.packed_rows)
    return Schedule(
        steps=steps,
        warmup_steps=warmup,
        rows_per_step=loader.global_batch_size,
        epochs=None if loader.steps_per_epoch is None else steps / loader.steps_per_epoch,
        tokens=round(steps * loader.global_batch_size * tokens_per_row),
        lr_first=peak * multiplier(0),
        lr_peak=peak * multiplier(highest),
        lr_last=peak * multiplier(steps - 1),
    )
