"""What MFU is reckoned from: the operations of a trained token, and the peak of the card."""

from __future__ import annotations

import torch

from trainer.dist import Dist
from trainer.models.decoder import DecoderShape
from trainer.schema import Config

PEAK_BF16_TFLOPS = {"H100": 989.0, "H200": 989.0, "A100": 312.0}
"""Dense bf16 peak per card, by a part of the name that CUDA reports (SXM figures of NVIDIA's data sheets)."""
LIMITED_VARIANTS = ("PCIe", "NVL", "MIG")
"""Variants of those cards with another peak."""


def flops_per_token(module: torch.nn.Module, shape: DecoderShape, config: Config) -> float:
    """Of a trained token, forward and backward. An untied embedding is looked up, not multiplied with, and counts for
    nothing. A frozen parameter takes part in two products instead of three: it has no gradient."""
    sizes = [
        (parameter.numel(), parameter.requires_grad)
        for name, parameter in module.named_parameters()
        if shape.tie_embeddings or not name.endswith("embed_tokens.weight")
    ]
    flops = _dense_flops(
        sum(size for size, _ in sizes),
        layers=shape.num_layers,
        heads=shape.num_heads,
        head_dim=shape.head_dim,
        seq_len=config.data.seq_len,
    )
    return flops - 2.0 * sum(size for size, trained in sizes if not trained)


def _dense_flops(num_params: int, *, layers: int, heads: int, head_dim: int, seq_len: int) -> float:
    """Floating point operations of one trained token: 6N + 12·L·H·Dh·T, without a discount for causality."""
    return 6.0 * num_params + 12.0 * layers * heads * head_dim * seq_len


def peak_flops(config: Config, dist: Dist) -> float | None:
    """The bf16 peak of this rank's card; None for other cards and for fp32 runs, whose peak is another."""
    if dist.device.type != "cuda" or config.train.precision != "bf16":
        return None
    return card_peak_flops(torch.cuda.get_device_name(dist.device))


def card_peak_flops(card: str) -> float | None:
    """The card's dense bf16 peak in FLOP/s; None for a card whose peak is not known for sure."""
    if any(variant in card for variant in LIMITED_VARIANTS):
        return None
    return next((tflops * 1e12 for name, tflops in PEAK_BF16_TFLOPS.items() if name in card), None)
