"""Builds a Run from a config and its data: the model on its backend, with initial weights or a checkpoint's."""

from __future__ import annotations

import os
import random
from pathlib import Path

import torch
from torch import nn

from trainer.checkpoint.resume import CheckpointRequirements, choose, render_changes, render_doomed, resume
from trainer.config.load import config_to_dict
from trainer.data.loader import Data
from trainer.dist import Dist
from trainer.metrics.flops import peak_flops
from trainer.metrics.log import MetricsLog
from trainer.metrics.trackers import open_trackers
from trainer.models.build import build_model, fill_weights, is_partly_frozen, trained_part
from trainer.models.protocol import Shape
from trainer.optim.build import build_optimizer
from trainer.optim.schedules import peak_learning_rate
from trainer.parallel.backend import Backend
from trainer.parallel.choose import make_backend
from trainer.schema import METRICS_FILE, Config
from trainer.train.graphs import CudaCapture, GraphedMicroBatches, decide_graphs
from trainer.train.recipe import Basis, Recipe
from trainer.train.run import LossFn, Run


def build_run(recipe: Recipe, config: Config, run_dir: Path, dist: Dist, *, basis: Basis, data: Data) -> Run:
    """Everything that the loop needs: resumed from a checkpoint, else with the weights of `basis`, else random."""
    dist.startup.enter("model")
    shape, folder = basis.shape, basis.folder
    backend, model = make_backend(config, dist), build_model(config, shape)
    flops = model.flops()
    module = backend.prepare(model)
    optimizer = build_optimizer(module, config.optim)
    dist.startup.enter("weights")
    choice = choose(config, run_dir, dist)
    if not choice.paths or is_partly_frozen(module):  # a checkpoint leaves out frozen parameters
        fill_weights(config, module, folder, dist)
    part = trained_part(config, module, folder, dist)
    hashes, state, loss_fn = dict(recipe.hashes(basis)), recipe.state, recipe.loss(config)
    required = CheckpointRequirements(shape.to_dict(), part, hashes)
    resumed, notes = resume(choice, required, module, optimizer, data.train, dist, state=state)
    start_step, extra = (0, {}) if resumed is None else (resumed.step, resumed.extra)
    log = MetricsLog(
        run_dir / METRICS_FILE, total_steps=data.train.total_steps, keep_through=start_step, enabled=dist.is_main
    )
    if dist.is_main:
        log.trackers += open_trackers(config, run_dir, keep_through=start_step, tell=log.note)
    total, peak = data.train.total_steps, peak_learning_rate(config.optim, data.train.global_batch_size)
    notes += render_changes(extra, config, step=start_step, total_steps=total, peak=peak)
    for note in [*notes, *(render_doomed(run_dir, start_step) if dist.is_main else [])]:
        log.note(note)
    now = {"config": config_to_dict(config), "shape": shape.to_dict(), "part": part, "hashes": hashes}
    return Run(
        config=config,
        run_dir=run_dir,
        dist=dist,
        backend=backend,
        module=module,
        optimizer=optimizer,
        data=data,
        loss_fn=loss_fn,
        log=log,
        evaluate=recipe.evaluate,
        state=state,
        largest_batch=recipe.largest_batch,
        flops=flops,
        peak_flops=peak_flops(config, dist),
        extra={**extra, **now, "total_steps": data.train.total_steps},
        start_step=start_step,
        graphed=graphed_micro_batches(config, shape, backend, module, loss_fn),
    )


def graphed_micro_batches(
    config: Config, shape: Shape, backend: Backend, module: nn.Module, loss_fn: LossFn
) -> GraphedMicroBatches | None:
    """Runs micro-batches as CUDA graphs; None if these are not wanted."""
    compiled = backend.compiled and backend.dist.device.type == "cuda"
    wanted = decide_graphs(config, shape, backend=backend.name, compiled=compiled)
    return GraphedMicroBatches(module, loss_fn, CudaCapture()) if wanted else None


def seed_everything(config: Config, dist: Dist) -> None:
    """Seed the generators, each rank differently. Choose deterministic kernels if the config asks for them."""
    random.seed(config.train.seed + dist.rank)
    torch.manual_seed(config.train.seed + dist.rank)
    if config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA's libraries start
        torch.use_deterministic_algorithms(True)
