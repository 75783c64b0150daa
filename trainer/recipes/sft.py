"""Supervised fine-tuning of a causal language model, from tokenizer to verified export."""

from __future__ import annotations

import json
import os
import random
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainer import checkpoint, loop, metrics
from trainer.config import config_notes, config_to_dict
from trainer.data.loader import Data, build_data
from trainer.data.tokenizer import load_tokenizer, vocab_size
from trainer.dist import Dist, on_rank0
from trainer.errors import ConfigError, ModelError
from trainer.losses import sft_loss
from trainer.models import hf
from trainer.models.decoder import DecoderShape
from trainer.optim import build_optimizer
from trainer.parallel import make_backend
from trainer.schema import CHECKPOINTS_DIR, EXPORT_DIR, JOB_ID_ENV, METRICS_FILE, OUTCOME_FILE, RESTARTED_ENV, Config

GREEDY_QUESTION = "What does os.path.join do?"


def run(config: Config, run_dir: Path, dist: Dist) -> int:
    """Train as configured, write everything into `run_dir`, and return the exit code."""
    tokenizer = load_tokenizer(config)
    quiet_transformers()
    folder = pretrained_folder(config, dist)
    shape = hf.shape_from_config(config.model, vocab_size(tokenizer), folder=folder)
    check_length(config, shape)
    train = build(config, run_dir, dist, tokenizer=tokenizer, shape=shape, folder=folder)
    tell_plan(train)

    result = loop.train(train)

    outcome = {
        "state": "stopped" if result.stopped else "succeeded",
        "steps": result.step,
        "eval_loss_first": result.eval_loss_first,
        "eval_loss_last": result.eval_loss_last,
        "export": None,
        "greedy": None,
    }
    if config.run.export and not result.stopped:
        outcome |= export(run_dir / EXPORT_DIR, shape, train.module, tokenizer, dist)
        train.log.note(f"exported to {run_dir / EXPORT_DIR}: reopened with transformers, same weights and logits")
    on_rank0(dist, lambda: write_outcome(run_dir, outcome))
    train.log.note(render_outcome(outcome, train.data.train.total_steps))
    train.log.close()
    return 0


def build(
    config: Config, run_dir: Path, dist: Dist, *, tokenizer: Any, shape: DecoderShape, folder: Path | None
) -> loop.Run:
    """Everything that the loop needs: resumed from a checkpoint, or with the weights in `folder`, or random ones."""
    seed_everything(config, dist)
    data = build_data(config, dist, tokenizer)
    backend = make_backend(config, dist)
    module = backend.prepare(shape)
    optimizer = build_optimizer(module, config.optim)
    path = resume_path(config, run_dir, dist)
    if path is None:
        fill_weights(config, module, folder)
        start_step, extra, changed = 0, {}, []
    else:
        check_resumable(path, checkpoint.read_info(path), shape, data)
        resumed = checkpoint.load(path, module, optimizer, dist)
        start_step, extra = resumed.step, resumed.extra
        changed = changed_keys(extra.get("config", {}), config_to_dict(config))
    log = metrics.MetricsLog(
        run_dir / METRICS_FILE, total_steps=data.train.total_steps, keep_through=start_step, enabled=dist.is_main
    )
    if changed:
        log.note(f"note: changed since the checkpoint, in force from here on: {', '.join(changed)}")
    return loop.Run(
        config=config,
        run_dir=run_dir,
        dist=dist,
        backend=backend,
        module=module,
        optimizer=optimizer,
        data=data,
        loss_fn=partial(sft_loss, packed=config.data.packing),
        log=log,
        flops_per_token=flops_per_token(shape, config),
        peak_flops=peak_flops(config, dist),
        extra={**extra, "config": config_to_dict(config), "shape": asdict(shape)},
        start_step=start_step,
    )


def seed_everything(config: Config, dist: Dist) -> None:
    """Seed the generators, each rank differently; and choose deterministic kernels when asked."""
    random.seed(config.train.seed + dist.rank)
    torch.manual_seed(config.train.seed + dist.rank)
    if config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA's libraries start
        torch.use_deterministic_algorithms(True)


def quiet_transformers() -> None:
    """No progress bars of transformers between our lines."""
    from transformers.utils import logging

    logging.disable_progress_bar()


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


def fill_weights(config: Config, module: torch.nn.Module, folder: Path | None) -> None:
    """Give a new run its first weights: the pretrained ones, or random ones by seed."""
    if folder is not None and config.model.init != "random":
        hf.load_pretrained(module, folder)
    else:
        hf.init_random(module, config.train.seed)


def resume_path(config: Config, run_dir: Path, dist: Dist) -> Path | None:
    """The checkpoint that `train.resume` means; None for a run that starts anew.

    After a restart by the host, what this run has saved comes first: `train.resume` says where it began.
    """
    if config.train.resume == "auto" or os.environ.get(RESTARTED_ENV):
        own = checkpoint.agree_on_newest(run_dir / CHECKPOINTS_DIR, dist)
        if own is not None or config.train.resume == "auto":
            return own
    if config.train.resume == "never":
        return None
    path = Path(config.train.resume).expanduser()
    if not checkpoint.is_complete(path):
        newest = checkpoint.newest_complete(path / CHECKPOINTS_DIR)
        raise ConfigError(
            f"train.resume is {config.train.resume}, and {path.absolute()} is no complete checkpoint",
            hint=f"did you mean {newest}?" if newest else "name a folder step_NNNNNN that holds a file COMPLETE",
        )
    return path


def check_resumable(path: Path, saved: checkpoint.Resumed, shape: DecoderShape, data: Data) -> None:
    """Go to the checkpoint's place in the data. Raises when model, data or length of the run are not those of it."""
    now = asdict(shape)
    before = saved.extra.get("shape", now)
    changed = [f"{name} {before.get(name)} -> {now[name]}" for name in now if before.get(name) != now[name]]
    if changed:
        raise ModelError(
            f"{path} was made by another model: {', '.join(changed)}; restore it, or start anew with train.resume=never"
        )
    data.train.load_state_dict(saved.extra["data"])
    if saved.step > data.train.total_steps:
        raise ConfigError(
            f"{path} is after step {saved.step}, and the run has {data.train.total_steps} steps",
            hint="raise train.steps, or name an earlier checkpoint in train.resume",
        )


def changed_keys(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """`KEY OLD -> NEW` of everything that decides the steps to come and is not as the checkpoint's run had it."""
    keys = [("optim", key) for key in now["optim"]]
    keys += [("train", key) for key in ("steps", "epochs", "micro_batch_size", "grad_accum_steps", "global_batch_size")]
    keys += [("train", "precision"), ("parallel", "reduce_dtype")]
    pairs = [(f"{section}.{key}", before.get(section, {}).get(key), now[section][key]) for section, key in keys]
    return [f"{key} {old} -> {new}" for key, old, new in pairs if before and old != new]


def tell_plan(train: loop.Run) -> None:
    """Say what is about to happen, before the first step."""
    config, loader = train.config, train.data.train
    notes = [
        f"note: {note}" for note in config_notes(config, backend=train.backend.name, deployed=JOB_ID_ENV in os.environ)
    ]
    if config.optim.warmup_steps > loader.total_steps:  # an error already where train.steps says so
        warmup = f"optim.warmup_steps is {config.optim.warmup_steps}"
        notes.append(f"note: {warmup}, more than the run's {loader.total_steps}: the learning rate never peaks")
    resumed = [f"resuming after step {train.start_step}"] if train.start_step else []
    size = f"{loader.global_batch_size} rows x {config.data.seq_len} tokens"
    plan = f"{loader.total_steps} steps of {size}, {loader.steps_per_epoch:.1f} steps an epoch"
    for line in [*notes, *train.data.report.render(), *train.backend.describe().splitlines(), plan, *resumed]:
        train.log.note(line)


def flops_per_token(shape: DecoderShape, config: Config) -> float:
    return metrics.flops_per_token(
        shape.num_params,
        layers=shape.num_layers,
        heads=shape.num_heads,
        head_dim=shape.head_dim,
        seq_len=config.data.seq_len,
    )


def peak_flops(config: Config, dist: Dist) -> float | None:
    """The bf16 peak of this rank's card; None for other cards and for fp32 runs, whose peak is another."""
    if dist.device.type != "cuda" or config.train.precision != "bf16":
        return None
    return metrics.peak_flops(torch.cuda.get_device_name(dist.device))


def export(folder: Path, shape: DecoderShape, module: torch.nn.Module, tokenizer: Any, dist: Dist) -> dict[str, Any]:
    """Write the model in Hugging Face format, reopened and compared; every rank calls this.

    Returns the outcome's entries `export` and `greedy`: what the trainer's own model says to a fixed question, for
    anyone to compare with what another library makes of the export.
    """
    prompt_ids = greedy_prompt(tokenizer)
    tokens = hf.export_model(folder, module, shape=shape, tokenizer=tokenizer, prompt_ids=prompt_ids, dist=dist)
    return {"export": folder.name, "greedy": {"prompt_ids": prompt_ids, "tokens": tokens}}


def greedy_prompt(tokenizer: Any) -> list[int]:
    """The token ids of one fixed question, up to where the assistant begins."""
    turns = [{"role": "user", "content": GREEDY_QUESTION}]
    return list(tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False))


def write_outcome(run_dir: Path, outcome: dict[str, Any]) -> None:
    """Write outcome.json in one piece; it is the last file of a run."""
    aside = run_dir / f".tmp_{OUTCOME_FILE}"
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in outcome.items()]
    aside.write_text("{\n " + ",\n ".join(lines) + "\n}\n")  # a list of token ids on one line
    aside.replace(run_dir / OUTCOME_FILE)


def render_outcome(outcome: dict[str, Any], total_steps: int) -> str:
    """`succeeded after 200 of 200 steps, held-out loss 5.561 -> 2.213 (-60 %)`."""
    text = f"{outcome['state']} after {outcome['steps']} of {total_steps} steps"
    first, last = outcome["eval_loss_first"], outcome["eval_loss_last"]
    if first is None or last is None:
        return text
    return f"{text}, held-out loss {first:.4f} -> {last:.4f} ({(last - first) / first:+.0%})"
