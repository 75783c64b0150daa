"""The model that a config describes: its folder, the Decoder without storage, and its first weights."""

from __future__ import annotations

from pathlib import Path

import torch

from trainer.config.train import base_dtype
from trainer.dist import Dist
from trainer.errors import ConfigError
from trainer.models.adapter_files import adapter_folder, init_adapter, load_adapter, lora_spec
from trainer.models.decoder import Decoder, DecoderShape
from trainer.models.freezing import freeze, store_as
from trainer.models.hf import init_random, load_pretrained
from trainer.models.lora import attach, linear_names
from trainer.models.shapes import model_folder
from trainer.schema import Config
from trainer.tensors import DTYPES


def pretrained_folder(config: Config, dist: Dist) -> Path | None:
    """The local folder of a named model; None when the model is built from the config's fields."""
    if config.model.name is None:
        return None
    return model_folder(config.model.name, dist, weights=config.model.init != "random")


def check_length(config: Config, shape: DecoderShape) -> None:
    """Raise ConfigError for rows longer than the model knows positions; a named model brings that number itself."""
    if config.data.seq_len > shape.max_position_embeddings:
        limit = f"max_position_embeddings of {config.model.name}, {shape.max_position_embeddings}"
        raise ConfigError(f"data.seq_len is {config.data.seq_len}, more than {limit}", hint="lower data.seq_len")


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


def fill_weights(config: Config, module: torch.nn.Module, folder: Path | None, dist: Dist | None = None) -> None:
    """Give a new run its first weights: the pretrained ones, or random ones by seed; and so for adapters.

    `dist`: who may send them with parallel.sync_module_states; None: every process reads for itself.
    """
    if folder is not None and config.model.init != "random":
        load_pretrained(module, folder, sender=dist if config.parallel.sync_module_states else None)
    else:
        init_random(module, config.train.seed)
    if config.lora.adapter is not None:
        load_adapter(module, adapter_folder(config.lora))
    else:
        init_adapter(module, config.train.seed)
