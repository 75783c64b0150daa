"""What MFU is reckoned from: the operations of trained tokens, and the peak of the card."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trainer.dist import Dist
from trainer.models.decoder import DecoderShape
from trainer.schema import Config

PEAK_BF16_TFLOPS = {"H100": 989.0, "H200": 989.0, "A100": 312.0}
"""Dense bf16 peak per card, by a part of the name that CUDA reports (SXM figures of NVIDIA's data sheets)."""
LIMITED_VARIANTS = ("PCIe", "NVL", "MIG")
"""Variants of those cards with another peak."""


@dataclass(frozen=True)
class Flops:
    """Floating point operations of training, forward and backward: products with weights, and attention within each
    document, without a discount for causality (the convention of the PaLM paper, appendix B)."""

    products: float
    """Of a token: 6 for each parameter that multiplies."""
    attention: float
    """Of a token and each token of its document: 12·L·H·Dh."""

    def per_token(self, mean_length: float) -> float:
        """`mean_length`: of the document that a token stands in, so sum of squared lengths / sum of lengths."""
        return self.products + self.attention * mean_length


NO_FLOPS = Flops(0.0, 0.0)


def flops_of(module: torch.nn.Module, shape: DecoderShape) -> Flops:
    """An untied embedding is looked up, not multiplied with, and counts for nothing. A frozen parameter takes part in
    two products instead of three: it has no gradient."""
    sizes = [
        (parameter.numel(), parameter.requires_grad)
        for name, parameter in module.named_parameters()
        if shape.tie_embeddings or not name.endswith("embed_tokens.weight")
    ]
    return Flops(
        products=sum(size * (6.0 if trained else 4.0) for size, trained in sizes),
        attention=12.0 * shape.num_layers * shape.num_heads * shape.head_dim,
    )


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
