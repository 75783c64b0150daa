"""Adapters from PEFT's files: reads their settings, adds the config's, and loads the tensors into a (sharded) model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import nn

from trainer.errors import ConfigError, ModelError
from trainer.files import expanded
from trainer.models.hf import named_weights, render_names
from trainer.models.lora import (
    ALL_LINEAR,
    PAIR,
    LoraSpec,
    choose_targets,
    initial_adapter,
    is_adapter,
)
from trainer.models.weight_files import open_weights
from trainer.schema import LoraConfig
from trainer.tensors import local_tensor, own_slices
from trainer.typed import InvalidData, Within, from_json, read_json
from trainer.words import first_few, shortened

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."  # the names of PEFT's two wrappers

# Keys that a PEFT config may have beside rank, alpha, dropout, rslora and targets: its origin, and the choice of
# modules, which also follows from the names of the tensors.
_SILENT = {
    "peft_type", "peft_version", "task_type", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode",
    "r", "lora_alpha", "lora_dropout", "use_rslora", "target_modules", "exclude_modules", "layers_to_transform",
    "layers_pattern", "megatron_core", "qalora_group_size", "loftq_config", "ensure_weight_tying",
    "fan_in_fan_out",  # PEFT ignores it for a linear module
}  # fmt: skip
_INITS = (True, False, None, "gaussian", "eva", "orthogonal")  # the others change the base model's weights


@dataclass(frozen=True)
class AdapterFile:
    """The keys of an adapter_config.json that are read here, with PEFT's defaults."""

    peft_type: str | None = None
    r: Annotated[int, Within(1, 1 << 20)] = 8
    lora_alpha: Annotated[float, Within(-1e9, 1e9)] = 8.0
    lora_dropout: Annotated[float, Within(0, 1)] = 0.0
    use_rslora: bool = False
    init_lora_weights: bool | str | None = True


def lora_spec(config: LoraConfig, names: list[str]) -> LoraSpec | None:
    """The adapters that `config` asks for, over the linear modules `names`; None without LoRA.

    With `lora.adapter`, its settings are used. Raises ConfigError if the config contradicts them.
    """
    if config.adapter is None:
        if config.rank is None:
            return None
        targets = choose_targets(config.targets or [ALL_LINEAR], names)
        alpha = 16.0 if config.alpha is None else config.alpha
        return LoraSpec(config.rank, alpha, config.dropout or 0.0, bool(config.rslora), targets)
    theirs = read_spec(adapter_folder(config), names)
    targets = choose_targets(config.targets, names) if config.targets else theirs.targets
    for key in ("rank", "alpha", "rslora"):
        _check_equal(f"lora.{key}", getattr(config, key), getattr(theirs, key), config.adapter)
    if targets != theirs.targets:
        mine, file = (", ".join(short_names(t, names)) for t in (targets, theirs.targets))
        raise ConfigError(f"lora.targets means {mine}, and {config.adapter} has {file}", hint="drop lora.targets")
    dropout = theirs.dropout if config.dropout is None else config.dropout
    return LoraSpec(theirs.rank, theirs.alpha, dropout, theirs.rslora, targets)


def adapter_folder(config: LoraConfig) -> Path:
    """The folder that `lora.adapter` names."""
    assert config.adapter is not None
    return expanded(config.adapter)


def _check_equal(key: str, mine: Any, file: Any, folder: str) -> None:
    if mine is not None and mine != file:
        raise ConfigError(f"{key} is {mine}, and {folder} was made with {file}", hint=f"drop {key}")


def read_spec(folder: Path, names: list[str]) -> LoraSpec:
    """The adapters in a PEFT folder. Raises ModelError that names a feature which this trainer does not support."""
    said = _read_config(folder)
    found = {_module_of(key, folder) for key in open_weights(folder / WEIGHTS_FILE)}
    unknown = sorted(found - set(names))
    if unknown:
        raise ModelError(
            f"{folder} has adapters for {first_few(unknown, 5)};"
            " this model can have them for linear modules in its layers"
        )
    targets = tuple(name for name in names if name in found)
    return LoraSpec(said.r, said.lora_alpha, said.lora_dropout, said.use_rslora, targets)


@torch.no_grad()
def load_adapter(module: nn.Module, folder: Path) -> None:
    """Fill the adapters from a PEFT folder; each rank reads its share, as fp32. Names and shapes must match."""
    weights = adapter_weights(module)
    file = open_weights(folder / WEIGHTS_FILE)
    _check_names({PREFIX + name for name in weights}, set(file), folder)
    for name, parameter in weights.items():
        stored, local = file[PREFIX + name], local_tensor(parameter)
        if stored.shape != tuple(parameter.shape):
            raise ModelError(
                f"{folder}: {name} has shape {list(stored.shape)}, the model needs {list(parameter.shape)}"
            )
        if local.numel():
            local.copy_(stored.read(own_slices(parameter)))
        if not local.isfinite().all():
            raise ModelError(f"{folder}: {name} has values that are not finite")


@torch.no_grad()
def init_adapter(module: nn.Module, seed: int) -> None:
    """Fill the adapters with PEFT's initial values: the same for any number of ranks."""
    for name, parameter in adapter_weights(module).items():
        value = initial_adapter(name, tuple(parameter.shape), seed)
        local_tensor(parameter).copy_(value[own_slices(parameter)])


def adapter_weights(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of the adapters by name."""
    return {name: parameter for name, parameter in named_weights(module) if is_adapter(name)}


def _read_config(folder: Path) -> AdapterFile:
    path = folder / CONFIG_FILE
    try:
        config: dict[str, Any] = read_json(path, dict[str, Any])
        said = from_json(config, AdapterFile)
    except OSError as error:
        raise ModelError(f"{folder} is no PEFT adapter: {CONFIG_FILE} cannot be read: {error.strerror}") from error
    except InvalidData as damage:
        raise ModelError(f"{path}: {damage}") from None
    if said.peft_type != "LORA":
        raise ModelError(f"{path}: peft_type is {shortened(said.peft_type)}, and only LORA is supported")
    _refuse_unsupported(config, said, path)
    return said


def _refuse_unsupported(config: Mapping[str, Any], said: AdapterFile, path: Path) -> None:
    neutral = {"bias": "none", "init_lora_weights": config.get("init_lora_weights")}
    used = [key for key, value in config.items() if key not in _SILENT and value and value != neutral.get(key)]
    if said.init_lora_weights not in _INITS:
        used.append("init_lora_weights")
    if used:
        told = first_few([f"{shortened(key)}={shortened(config[key])}" for key in used], 5)
        raise ModelError(f"{path}: {told} is not supported; plain LoRA on linear modules is")


def _module_of(key: str, folder: Path) -> str:
    module, _, child = key.removeprefix(PREFIX).removesuffix(".weight").rpartition(".")
    if not key.startswith(PREFIX) or child not in PAIR:
        raise ModelError(f"{folder / WEIGHTS_FILE}: {key} is no tensor of a LoRA pair")
    return module


def _check_names(expected: set[str], found: set[str], folder: Path) -> None:
    missing, unexpected = sorted(expected - found), sorted(found - expected)
    if missing or unexpected:
        raise ModelError(f"{folder}: the adapters are not those asked for. {render_names(missing, unexpected)}")


def short_names(targets: Sequence[str], names: Sequence[str]) -> list[str]:
    """The targets by the last part of their names if these match the same modules, else by their whole names."""
    ends = sorted({name.rpartition(".")[2] for name in targets})
    meant = [name for name in names if name.rpartition(".")[2] in ends]
    return ends if set(meant) == set(targets) else list(targets)
