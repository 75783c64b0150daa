"""Which parameters stay as they are, and how these are stored."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from trainer.errors import ConfigError
from trainer.models.decoder import Decoder
from trainer.models.patterns import matching


def freeze(decoder: Decoder, patterns: Sequence[str]) -> None:
    """Take the parameters that the patterns mean out of training. A tied head is the embedding: one parameter.

    Raises ConfigError for a pattern that means none, and when nothing is left to train.
    """
    parameters = dict(decoder.named_parameters())
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


def store_as(decoder: Decoder, dtype: torch.dtype) -> None:
    """Store the parameters of a decoder on the meta device in `dtype`; buffers stay as they are."""
    for parameter in decoder.parameters():
        parameter.data = parameter.data.to(dtype)
