"""From a config and its data to a Run: the model on its backend, with first weights or those of a checkpoint."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType

import torch

from trainer import metrics
from trainer.config import config_notes, config_to_dict
from trainer.config_length import length_notes
from trainer.config_optim import base_dtype
from trainer.data.loader import Data
from trainer.dist import Dist
from trainer.errors import ConfigError
from trainer.models import hf
from trainer.models.adapter_files import adapter_folder, init_adapter, load_adapter, lora_spec
from trainer.models.decoder import Decoder, DecoderShape
from trainer.models.fingerprint import trained_part
from trainer.models.freezing import freeze, is_partly_frozen, store_as
from trainer.models.lora import attach, linear_names, render_lora
from trainer.optim.build import build_optimizer
from trainer.optim.groups import render_groups
from trainer.optim.schedules import peak_learning_rate, render_lr_scaling
from trainer.parallel.choose import make_backend
from trainer.parallel.tensors import DTYPES
from trainer.resuming import Identity, choose, render_changes, resume
from trainer.run import LossFn, Run
from trainer.schema import JOB_ID_ENV, METRICS_FILE, Config
from trainer.summary import summarize
from trainer.trackers import open_trackers


def build_run(
    config: Config,
    run_dir: Path,
    dist: Dist,
    *,
    shape: DecoderShape,
    folder: Path | None,
    data: Data,
    loss_fn: LossFn,
    hashes: Mapping[str, str] = MappingProxyType({}),
) -> Run:
    """Everything that the loop needs: resumed from a checkpoint, or with the weights in `folder`, or random ones.

    `hashes`: of what a checkpoint must have been made with, by what it is (`tokenizer`).
    """
    backend = make_backend(config, dist)
    module = backend.prepare(build_decoder(config, shape))
    optimizer = build_optimizer(module, config.optim)
    choice = choose(config, run_dir, dist)
    if not choice.paths or is_partly_frozen(module):  # a checkpoint leaves out what is frozen
        fill_weights(config, module, folder, dist)
    part = trained_part(config, module, folder, dist)
    identity = Identity(asdict(shape), part, hashes)
    resumed, notes = resume(choice, identity, module, optimizer, data.train, dist)
    start_step, extra = (0, {}) if resumed is None else (resumed.step, resumed.extra)
    log = metrics.MetricsLog(
        run_dir / METRICS_FILE, total_steps=data.train.total_steps, keep_through=start_step, enabled=dist.is_main
    )
    if dist.is_main:
        log.trackers += open_trackers(config, run_dir, keep_through=start_step, tell=log.note)
    total, peak = data.train.total_steps, peak_learning_rate(config.optim, data.train.global_batch_size)
    for note in [*notes, *render_changes(extra, config, step=start_step, total_steps=total, peak=peak)]:
        log.note(note)
    now = {"config": config_to_dict(config), "shape": asdict(shape), "part": part, "hashes": dict(hashes)}
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
        flops_per_token=flops_per_token(module, shape, config),
        peak_flops=peak_flops(config, dist),
        extra={**extra, **now, "total_steps": data.train.total_steps},
        start_step=start_step,
    )


def build_decoder(config: Config, shape: DecoderShape) -> Decoder:
    """The model as configured, on the meta device: every parameter is there, none has storage.

    What is not trained is frozen, before any backend wraps the model.
    """
    with torch.device("meta"):
        decoder = Decoder(shape, compute_dtype=DTYPES[config.train.precision])
        spec = lora_spec(config.lora, linear_names(decoder))
        if spec is not None:
            store_as(decoder, DTYPES[base_dtype(config)])
            attach(decoder, spec)
    freeze(decoder, config.model.freeze)
    return decoder


def seed_everything(config: Config, dist: Dist) -> None:
    """Seed the generators, each rank differently; and choose deterministic kernels when asked."""
    random.seed(config.train.seed + dist.rank)
    torch.manual_seed(config.train.seed + dist.rank)
    if config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA's libraries start
        torch.use_deterministic_algorithms(True)


def pretrained_folder(config: Config, dist: Dist) -> Path | None:
    """The local folder of a named model; None when the model is built from the config's fields."""
    if config.model.name is None:
        return None
    return hf.model_folder(config.model.name, dist, weights=config.model.init != "random")


def check_length(config: Config, shape: DecoderShape) -> None:
    """Raise ConfigError for rows longer than the model knows positions; a named model brings that number itself."""
    if config.data.seq_len > shape.max_position_embeddings:
        limit = f"max_position_embeddings of {config.model.name}, {shape.max_position_embeddings}"
        raise ConfigError(f"data.seq_len is {config.data.seq_len}, more than {limit}", hint="lower data.seq_len")


def fill_weights(config: Config, module: torch.nn.Module, folder: Path | None, dist: Dist | None = None) -> None:
    """Give a new run its first weights: the pretrained ones, or random ones by seed; and so for adapters.

    `dist`: who may send them with parallel.sync_module_states; None: every process reads for itself.
    """
    if folder is not None and config.model.init != "random":
        hf.load_pretrained(module, folder, sender=dist if config.parallel.sync_module_states else None)
    else:
        hf.init_random(module, config.train.seed)
    if config.lora.adapter is not None:
        load_adapter(module, adapter_folder(config.lora))
    else:
        init_adapter(module, config.train.seed)


def tell_plan(train: Run) -> None:
    """Say what is about to happen, before the first step."""
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
    for line in [*notes, *train.data.report.render(), *backend, *summary, *rates, plan, *resumed]:
        train.log.note(line)


def _epoch_text(steps: float | None) -> str:
    return "the length of an epoch is not known" if steps is None else f"{steps:.1f} steps an epoch"


def flops_per_token(module: torch.nn.Module, shape: DecoderShape, config: Config) -> float:
    """Of a trained token, forward and backward. An untied embedding is looked up, not multiplied with, and counts for
    nothing. A frozen parameter takes part in two products instead of three: it has no gradient."""
    sizes = [
        (parameter.numel(), parameter.requires_grad)
        for name, parameter in module.named_parameters()
        if shape.tie_embeddings or not name.endswith("embed_tokens.weight")
    ]
    flops = metrics.flops_per_token(
        sum(size for size, _ in sizes),
        layers=shape.num_layers,
        heads=shape.num_heads,
        head_dim=shape.head_dim,
        seq_len=config.data.seq_len,
    )
    return flops - 2.0 * sum(size for size, trained in sizes if not trained)


def peak_flops(config: Config, dist: Dist) -> float | None:
    """The bf16 peak of this rank's card; None for other cards and for fp32 runs, whose peak is another."""
    if dist.device.type != "cuda" or config.train.precision != "bf16":
        return None
    return metrics.peak_flops(torch.cuda.get_device_name(dist.device))
