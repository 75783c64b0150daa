"""The plan of a run as lines for the console, including the model's parameters."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from trainer.config.load import config_notes
from trainer.config.train import length_notes
from trainer.models.lora import render_lora
from trainer.optim.build import render_groups
from trainer.optim.schedules import render_lr_scaling
from trainer.schema import JOB_ID_ENV
from trainer.train.run import Run


@dataclass(frozen=True)
class ParameterSummary:
    """The numbers of parameters, over all ranks; a tied one counts once."""

    total: int
    trainable: int
    by_dtype: dict[str, int]
    """The most frequent dtype first."""
    example: dict[str, str]
    """A parameter's name for each dtype."""

    @property
    def frozen(self) -> int:
        return self.total - self.trainable

    def render(self) -> list[str]:
        """`parameters: 1,234 in all, 1,034 trained, 200 frozen (16.2 %); float32`, and a line for mixed dtypes."""
        counts = f"parameters: {self.total:,} in all, {self.trainable:,} trained"
        if self.frozen:
            counts += f", {self.frozen:,} frozen ({self.frozen / self.total:.1%})"
        if len(self.by_dtype) < 2:
            return [f"{counts}; {next(iter(self.by_dtype), 'no dtype')}"]
        mixed = ", ".join(f"{count:,} {dtype} (e.g. {self.example[dtype]})" for dtype, count in self.by_dtype.items())
        return [counts, f"mixed dtypes: {mixed}"]


def summarize(module: nn.Module) -> ParameterSummary:
    """The summary of a module, sharded or not."""
    total = trainable = 0
    counts: dict[str, int] = {}
    example: dict[str, str] = {}
    for name, parameter in module.named_parameters():
        dtype = str(parameter.dtype).removeprefix("torch.")
        total += parameter.numel()
        trainable += parameter.numel() if parameter.requires_grad else 0
        counts[dtype] = counts.get(dtype, 0) + parameter.numel()
        example.setdefault(dtype, name)
    by_dtype = dict(sorted(counts.items(), key=lambda item: -item[1]))
    return ParameterSummary(total, trainable, by_dtype, example)


def log_plan(train: Run, chosen: Sequence[str] = ()) -> None:
    """Log the plan before the first step. `chosen`: lines about the values chosen for `auto`."""
    config, loader = train.config, train.data.train
    notes = [
        f"note: {note}" for note in config_notes(config, backend=train.backend.name, deployed=JOB_ID_ENV in os.environ)
    ]
    notes += [f"note: {note}" for note in length_notes(config, loader.total_steps)]
    is_over = train.start_step >= loader.total_steps
    more = ", the last: nothing is left to train; more train.steps or train.epochs goes on" if is_over else ""
    resumed = [f"resuming after step {train.start_step}{more}"] if train.start_step else []
    row = f"x {config.data.seq_len} tokens" if config.data.packing else f"of at most {config.data.seq_len} tokens"
    summary = summarize(train.module).render()
    size = f"{loader.global_batch_size} rows {row}"
    plan = f"{loader.total_steps} steps of {size}, {_epoch_text(loader.steps_per_epoch)}"
    rates = [*render_lora(train.module), *render_groups(train.optimizer.param_groups)]
    rates += render_lr_scaling(config.optim, loader.global_batch_size)
    backend = train.backend.describe().splitlines()
    if train.graphed is not None:
        backend.append("forward and backward of a micro-batch are one CUDA graph")
    for line in [*notes, *train.data.report.render(), *backend, *chosen, *summary, *rates, plan, *resumed]:
        train.log.note(line)


def _epoch_text(steps: float | None) -> str:
    return "the length of an epoch is not known" if steps is None else f"{steps:.1f} steps an epoch"
