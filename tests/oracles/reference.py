"""Models of transformers with random weights, of every family that the decoder knows."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.support.tiny import tiny_shape
from trainer.batch import IGNORE, Batch
from trainer.models.families.decoder import Decoder
from trainer.models.families.decoder_shape import DecoderShape, RopeScaling, shape_to_hf_config
from trainer.models.hf import load_pretrained

LLAMA3 = RopeScaling("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=32)
SHAPES = {
    "qwen2-tied": tiny_shape(family="qwen2"),
    "qwen2-untied-mha": tiny_shape(family="qwen2", tie_embeddings=False, num_kv_heads=4),
    "qwen3-tied": tiny_shape(rope_theta=1e6),
    "qwen3-wide-heads": tiny_shape(head_dim=16, tie_embeddings=False),
    "llama-untied": tiny_shape(family="llama", tie_embeddings=False, num_kv_heads=1),
    "llama-llama3-rope": tiny_shape(family="llama", rope_theta=5e5, rope_scaling=LLAMA3),
    "llama-linear-rope": tiny_shape(family="llama", rope_scaling=RopeScaling("linear", 4.0)),
}


def hf_model(shape: DecoderShape, seed: int = 0) -> PreTrainedModel:
    """transformers' model with eager attention and random fp32 weights, biases and norms included."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(shape_to_hf_config(shape), attn_implementation="eager").float().eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.1)
    return model


def save_hf(shape: DecoderShape, folder: Path) -> PreTrainedModel:
    """That model, also written into the folder."""
    model = hf_model(shape)
    model.save_pretrained(folder)
    return model


def from_folder(folder: Path, shape: DecoderShape, **options: torch.dtype) -> Decoder:
    """Our model with the weights of a folder."""
    decoder = Decoder(shape, **options)
    load_pretrained(decoder, folder)
    return decoder


def both_models(folder: Path, shape: DecoderShape) -> tuple[Decoder, PreTrainedModel]:
    """Ours and transformers' with the same weights."""
    theirs = save_hf(shape, folder)
    return from_folder(folder, shape), theirs


def hf_labels(batch: Batch) -> Tensor:
    """The labels as transformers wants them, which shifts them itself."""
    return F.pad(batch.labels[:, :-1], (1, 0), value=IGNORE)
