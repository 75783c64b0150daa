"""The model that a config describes, of any family: builds it without storage, freezes parts, fills the first weights.

A checkpoint does not contain frozen parameters. It records the base and the trained tensors, which a resume compares.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from trainer.config.train import base_dtype
from trainer.dist import Dist, on_rank0
from trainer.errors import ConfigError
from trainer.models.adapter_files import adapter_folder, init_adapter, load_adapter, lora_spec
from trainer.models.hf import init_random, load_pretrained
from trainer.models.lora import attach, linear_names, lora_of
from trainer.models.patterns import matching
from trainer.models.protocol import Model, Shape
from trainer.schema import Config
from trainer.tensors import DTYPES

SAMPLES = 64
SAMPLE_BYTES = 4096


def check_length(config: Config, shape: Shape) -> None:
    """Raise ConfigError if rows are longer than the model's max_position_embeddings; a named model sets that number."""
    if config.data.seq_len > shape.max_position_embeddings:
        limit = f"max_position_embeddings of {config.model.name}, {shape.max_position_embeddings}"
        raise ConfigError(f"data.seq_len is {config.data.seq_len}, more than {limit}", hint="lower data.seq_len")


def check_export(config: Config, shape: Shape) -> None:
    """Raise ConfigError if the config asks for an export of a model that transformers does not have."""
    if config.run.export and shape.hf_class is None:
        message = "run.export is true, and transformers has no model of this kind to write an export for"
        raise ConfigError(message, hint="set run.export=false; checkpoints hold the weights")


def build_model(config: Config, shape: Shape) -> Model:
    """The model as configured, on the meta device: all parameters exist, without storage.

    Parameters that are not trained are frozen before a backend wraps the model.
    """
    with torch.device("meta"):
        model = shape.build(DTYPES[config.train.precision])
        spec = lora_spec(config.lora, linear_names(model))
        if spec is not None:
            store_as(model, DTYPES[base_dtype(config)])
            attach(model, spec)
    freeze(model, config.model.freeze)
    return model


def fill_weights(config: Config, module: torch.nn.Module, folder: Path | None, dist: Dist | None = None) -> None:
    """Give a new run its first weights: pretrained ones, or random ones by seed; the same for adapters.

    `dist`: its rank 0 sends them if parallel.sync_module_states is set; None: every process reads them.
    """
    if folder is not None and config.model.init != "random":
        load_pretrained(module, folder, sender=dist if config.parallel.sync_module_states else None)
    else:
        init_random(module, config.train.seed)
    if config.lora.adapter is not None:
        load_adapter(module, adapter_folder(config.lora))
    else:
        init_adapter(module, config.train.seed)


# --- frozen parameters -----------------------------------------------------------------------------------------------


def freeze(model: Model, patterns: Sequence[str]) -> None:
    """Freeze the parameters that match the patterns. A tied head and the embedding are one parameter.

    Raises ConfigError for a pattern without a match, and if nothing is left to train.
    """
    parameters = dict(model.named_parameters())
    for pattern in patterns:
        for name in matching(pattern, parameters, "model.freeze"):
            parameters[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise ConfigError(
            f"model.freeze is {list(patterns)}, all {len(parameters)} tensors of the model: nothing is left to train",
            hint="drop a pattern",
        )


def is_partly_frozen(module: nn.Module) -> bool:
    return not all(parameter.requires_grad for parameter in module.parameters())


def store_as(model: Model, dtype: torch.dtype) -> None:
    """Store the parameters of a model on the meta device in `dtype`; buffers stay as they are."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def trained_part(config: Config, module: nn.Module, folder: Path | None, dist: Dist) -> dict[str, str]:
    """Base, adapters and trained tensors as text; empty if the whole model is trained. Every rank must call this."""
    if not is_partly_frozen(module):
        return {}
    names = sorted(name.removeprefix("module.") for name, p in module.named_parameters() if p.requires_grad)
    part = {"base": on_rank0(dist, lambda: base_fingerprint(config, folder))}
    spec = lora_of(module)
    if spec is not None:
        part |= {"lora.rank": str(spec.rank), "lora.alpha": f"{spec.alpha:g}", "lora.rslora": str(spec.rslora).lower()}
    digest = hashlib.sha256("\n".join(names).encode()).hexdigest()[:8]
    return {**part, "trained": f"{len(names)} tensors ({digest})"}


def base_fingerprint(config: Config, folder: Path | None) -> str:
    """Identifies the weights that a run starts from: the same for the same weights in any folder."""
    if folder is None or config.model.init == "random":
        return f"random by seed {config.train.seed}"
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        _update_with_samples(digest, path)
    return f"sha256 {digest.hexdigest()[:16]}"


def _update_with_samples(digest: hashlib._Hash, path: Path) -> None:
    """Hash evenly spread pieces, with the first (names and shapes) and the last: a whole 7B model takes a minute."""
    last = max(0, path.stat().st_size - SAMPLE_BYTES)
    with path.open("rb") as file:
        for number in range(SAMPLES):
            file.seek(last * number // (SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
