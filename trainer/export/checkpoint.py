"""A checkpoint of any run as Hugging Face files, or as one file of whole tensors: one process, on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint.errors import CheckpointError
from trainer.checkpoint.folders import is_complete, newest_complete, steps_in
from trainer.checkpoint.load import Resumed, load_model, read_full, read_info
from trainer.config.load import ANY_WORLD, config_from_dict
from trainer.data.tokenize.tokenizer import load_tokenizer, quiet_transformers
from trainer.dist import Dist
from trainer.errors import ModelError
from trainer.export.finish import export, render_export
from trainer.export.generation import generation_of
from trainer.export.model import random_rows
from trainer.files import expanded, lack_of_room
from trainer.models.adapter_files import CONFIG_FILE
from trainer.models.build import base_fingerprint, build_model, fill_weights, is_partly_frozen
from trainer.models.lora import lora_of
from trainer.models.protocol import Model, Shape
from trainer.optim.low_bit import torchao_adamw8bit
from trainer.schema import ADAPTER_DIR, CHECKPOINTS_DIR, Config
from trainer.tensors import DTYPES
from trainer.train.recipe import make_recipe
from trainer.words import render_bytes

ALONE = Dist(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"))
HEADROOM_BYTES = 64 * 2**20  # for the tokenizer's files and the file system's metadata

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Source:
    """The checkpoint to export, and its data about its run."""

    path: Path
    run_dir: Path
    step: int
    config: Config
    shape: Shape
    base: str | None
    """Fingerprint of the weights under adapters or frozen parts; None if the whole model was trained."""


# --- the choice of a checkpoint ---------------------------------------------------------------------------------------


def find_source(run: Path, step: str | None) -> Source:
    """The checkpoint to export: of a run folder the newest complete one, or that of `step` (a number or a folder).

    `run` may also be a checkpoint. Raises ModelError that names the existing ones.
    """
    path = _find_checkpoint(run, step)
    try:
        info = read_info(path)
    except CheckpointError as error:
        raise _unusable(path, error) from error
    return _source(path, info)


def _find_checkpoint(run: Path, step: str | None) -> Path:
    if not run.is_dir():
        raise ModelError(f"there is no run folder {run.absolute()}", hint="a run's first line names its folder")
    if step is not None and not step.isdigit():
        run = expanded(step)
    if is_complete(run):
        return run.absolute()
    folder = run / CHECKPOINTS_DIR
    if step is None or not step.isdigit():
        newest = newest_complete(folder)
        if newest is None:
            raise ModelError(
                f"{run.absolute()} holds no complete checkpoint",
                hint="a run saves every train.save_every steps and at its end; `deploy.py pull ID --checkpoints` brings"
                " them home",
            )
        return newest.absolute()
    steps = steps_in(folder)
    if int(step) not in steps:
        there = ", ".join(map(str, steps)) or "none"
        raise ModelError(f"{run.absolute()} has no complete checkpoint of step {step}", hint=f"it has: {there}")
    return steps[int(step)].absolute()


def _source(path: Path, info: Resumed) -> Source:
    shape, config = info.extra.get("shape"), info.extra.get("config")
    if shape is None or config is None:
        raise ModelError(f"{path} does not say which model it is of", hint="a checkpoint of this trainer does")
    run_dir = path.parent.parent if path.parent.name == CHECKPOINTS_DIR else path.parent
    base = (info.extra.get("part") or {}).get("base")
    read = config_from_dict(config, f"the config in {path}", world=ANY_WORLD)
    return Source(path, run_dir, info.step, read, make_recipe(read).family.read_shape(shape), base)


def _unusable(path: Path, error: CheckpointError) -> ModelError:
    others = [str(step) for step, other in steps_in(path.parent).items() if other.name != path.name]
    return ModelError(str(error), hint=f"others are there: --step {' or '.join(others)}" if others else "")


# --- a Hugging Face folder --------------------------------------------------------------------------------------------


def export_folder(source: Source, out: Path) -> Path:
    """The folder to write, absolute. Raises ModelError if it exists and is not an export."""
    folder = expanded(out).absolute()
    if folder.exists() and not any(
        (folder / name).is_file() for name in ("config.json", f"{ADAPTER_DIR}/{CONFIG_FILE}")
    ):
        raise ModelError(f"{folder} is there already and is no model", hint="name a new folder with --out")
    return folder


def export_checkpoint(
    source: Source, folder: Path, *, dtype: str, merged: bool, tokenizer_name: str | None, tell: Tell
) -> list[str]:
    """Write `folder` from the checkpoint as the end of its run would. Returns a line for each written folder.

    It appears only after transformers has read back the same model, or PEFT the same adapters.
    """
    if source.shape.hf_class is None:
        hint = "--full-state FILE writes its tensors"
        raise ModelError(f"{source.path} is of a kind of model that transformers does not have", hint=hint)
    check_space(folder, source.shape.num_params * DTYPES[dtype].itemsize)
    quiet_transformers()
    tokenizer = load_tokenizer(_with_tokenizer(source.config, tokenizer_name))
    tell(f"reading {source.path}")
    model = load_trained(source)
    if merged and lora_of(model) is None:
        raise ModelError(f"{source.path} has no adapters to merge", hint="leave out --merge")
    tell(f"writing {source.shape.num_params:,} parameters and comparing them with what is read back")
    folder.parent.mkdir(parents=True, exist_ok=True)
    written = export(
        folder,
        model,
        shape=source.shape,
        tokenizer=tokenizer,
        base_name=source.config.model.name,
        merged=merged or source.config.lora.merge_export,
        rows=random_rows(source.shape.vocab_size),
        dist=ALONE,
        dtype=DTYPES[dtype],
        generation=generation_of(source.config, tokenizer, source.shape.vocab_size, tell=tell),
    )
    return render_export(folder.parent, written)


def load_trained(source: Source) -> Model:
    """The checkpoint's model on the CPU. Frozen parameters are not in a checkpoint: they come from the run's source."""
    model = build_model(source.config, source.shape)
    model.to_empty(device="cpu")
    model.reset_buffers(torch.device("cpu"))
    if is_partly_frozen(model):
        base = make_recipe(source.config).family.folder(source.config, ALONE)
        _check_base(source, base)
        fill_weights(source.config, model, base)
    try:
        load_model(source.path, model, ALONE)
    except CheckpointError as error:
        raise _unusable(source.path, error) from error
    return model


def _check_base(source: Source, folder: Path | None) -> None:
    """Raise ModelError if the source of the frozen weights has changed since the run."""
    found = base_fingerprint(source.config, folder)
    if source.base is not None and found != source.base:
        raise ModelError(
            f"{source.path} was trained over other weights: {source.base}, and {folder or 'here'} has {found}",
            hint=f"restore the model that the run was given as model.name, {source.config.model.name}",
        )


def _with_tokenizer(config: Config, name: str | None) -> Config:
    return config if name is None else replace(config, data=replace(config.data, tokenizer=name))


# --- one file ---------------------------------------------------------------------------------------------------------


def write_full_state(source: Source, file: Path, *, tell: Tell) -> Path:
    """Write {"model", "optimizer", "step", "config"} with whole tensors by Hugging Face's names, for `torch.load`.

    Frozen parameters are not in a checkpoint, so they are not in the file.
    """
    file = expanded(file).absolute()
    tell(f"reading {source.path}")
    if source.config.optim.optimizer == "adamw8bit":
        quiet_transformers()
        torchao_adamw8bit()  # without this, torch.load does not know its tensors
    try:
        state = read_full(source.path)
    except CheckpointError as error:
        raise _unusable(source.path, error) from error
    size = _size(state)
    check_space(file, size)
    tell(f"writing {render_bytes(size)} to {file}")
    aside = file.with_name(f".{file.name}.partial")
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save({**state, "step": source.step, "config": read_info(source.path).extra["config"]}, aside)
    return aside.replace(file)


def _size(state: Mapping[str, Any]) -> int:
    return sum(_size(value) if isinstance(value, Mapping) else value.nbytes for value in state.values())


def check_space(target: Path, size: int) -> None:
    """Raise ModelError if the disk has no room, before anything is written."""
    parent = next(folder for folder in target.parents if folder.is_dir())
    lack = lack_of_room(parent, size + HEADROOM_BYTES)
    if lack:
        raise ModelError(f"no room for {target}: {lack}", hint="free some space, or name another disk")
