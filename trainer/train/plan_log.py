"""What is about to happen, in lines for the reader of the console."""

from __future__ import annotations

import os
from collections.abc import Sequence

from trainer.config.load import config_notes
from trainer.config.train import length_notes
from trainer.metrics.summary import summarize
from trainer.models.lora import render_lora
from trainer.optim.build import render_groups
from trainer.optim.schedules import render_lr_scaling
from trainer.schema import JOB_ID_ENV
from trainer.train.run import Run


def tell_plan(train: Run, chosen: Sequence[str] = ()) -> None:
    """Say what is about to happen, before the first step. `chosen`: what `auto` became, for precision and memory."""
    config, loader = train.config, train.data.train
    notes = [
        f"note: {note}" for note in config_notes(config, backend=train.backend.name, deployed=JOB_ID_ENV in os.environ)
    ]
    notes += [f"note: {note}" for note in length_notes(config, loader.total_steps)]
    resumed = [f"resuming after step {train.start_step}"] if train.start_step else []
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
