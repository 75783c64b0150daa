"""What MFU is reckoned from: the operations of trained tokens, and the peak of the card."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trainer.dist import Dist
from trainer.models.decoder import DecoderShape
from trainer.schema import Config

PEAK_BF16_TFLOPS = {"H100": 989.0, "H200": 989.0, "A100": 312.0}
"""Dense bf16 peak per card, by a part of the name that CUDA reports (SXM figures of NVIDIA's data sheets)."""
SUSTAINED_BF16_TFLOPS = {"H100": 685.0, "H200": 685.0}
"""What products of a 7B model's width reach over seconds, when the card's power is the limit: measured on an H100 SXM
(700 W, torch 2.11), whose arithmetic an H200 shares. Short runs of products reach up to 800."""
LIMITED_VARIANTS = ("PCIe", "NVL", "MIG")
"""Variants of those cards with another peak."""


@dataclass(frozen=True)
class Flops:
    """Floating point operations of training, forward and backward: products with weights, and attention within each
    document, without a discount for causality (the convention of the PaLM paper, appendix B)."""

    products: float
    """Of a token: 6 for each parameter that multiplies."""
    head: float
    """That part of them which only a token with a label needs: MFU counts it of every token, as is usual."""
    attention: float
    """Of a token and each token of its document: 12·L·H·Dh."""

    def per_token(self, mean_length: float) -> float:
        """`mean_length`: of the document that a token stands in, so sum of squared lengths / sum of lengths."""
        return self.products + self.attention * mean_length


NO_FLOPS = Flops(0.0, 0.0, 0.0)


def flops_of(module: torch.nn.Module, shape: DecoderShape) -> Flops:
    """An untied embedding is looked up, not multiplied with, and counts for nothing. A frozen parameter takes part in
    two products instead of three: it has no gradient."""
    flops = {
        name: parameter.numel() * (6.0 if parameter.requires_grad else 4.0)
        for name, parameter in module.named_parameters()
        if shape.tie_embeddings or not name.endswith("embed_tokens.weight")
    }
    head = "embed_tokens.weight" if shape.tie_embeddings else "lm_head.weight"
    return Flops(
        products=sum(flops.values()),
        head=sum(count for name, count in flops.items() if name.endswith(head)),
        attention=12.0 * shape.num_layers * shape.num_heads * shape.head_dim,
    )


def peak_flops(config: Config, dist: Dist) -> float | None:
    """The bf16 peak of this rank's card; None for other cards and for fp32 runs, whose peak is another."""
    if dist.device.type != "cuda" or config.train.precision != "bf16":
        return None
    return card_peak_flops(torch.cuda.get_device_name(dist.device))


def card_peak_flops(card: str) -> float | None:
    """The card's dense bf16 peak in FLOP/s; None for a card whose peak is not known for sure."""
    return _of_card(card, PEAK_BF16_TFLOPS)


def sustained_flops(card: str) -> float | None:
    """FLOP/s that large bf16 products keep up on the card; None where nobody has measured it."""
    return _of_card(card, SUSTAINED_BF16_TFLOPS)


def _of_card(card: str, tflops_by_name: dict[str, float]) -> float | None:
    if any(variant in card for variant in LIMITED_VARIANTS):
        return None
    return next((tflops * 1e12 for name, tflops in tflops_by_name.items() if name in card), None)
