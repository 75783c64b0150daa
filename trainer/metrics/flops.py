"""The peak of a card, for MFU; the model gives the operations of a token (`Model.flops`)."""

from __future__ import annotations

import torch

from trainer.dist import Dist
from trainer.schema import Config

PEAK_BF16_TFLOPS = {"H100": 989.0, "H200": 989.0, "A100": 312.0}
"""Dense bf16 peak per card, by a part of the name that CUDA reports (SXM figures from NVIDIA's data sheets)."""
SUSTAINED_BF16_TFLOPS = {"H100": 685.0, "H200": 685.0}
"""Rate of products of a 7B model's width over seconds, limited by the card's power: measured on an H100 SXM (700 W,
torch 2.11); an H200 has the same arithmetic. Short runs of products reach up to 800."""
LIMITED_VARIANTS = ("PCIe", "NVL", "MIG")
"""Variants of those cards with a different peak."""


def peak_flops(config: Config, dist: Dist) -> float | None:
    """The bf16 peak of this rank's card; None for other cards and for fp32 runs, which have a different peak."""
    if dist.device.type != "cuda" or config.train.precision != "bf16":
        return None
    return card_peak_flops(torch.cuda.get_device_name(dist.device))


def card_peak_flops(card: str) -> float | None:
    """The card's dense bf16 peak in FLOP/s; None if it is not known for certain."""
    return _of_card(card, PEAK_BF16_TFLOPS)


def sustained_flops(card: str) -> float | None:
    """FLOP/s that large bf16 products sustain on the card; None if this was not measured."""
    return _of_card(card, SUSTAINED_BF16_TFLOPS)


def _of_card(card: str, tflops_by_name: dict[str, float]) -> float | None:
    if any(variant in card for variant in LIMITED_VARIANTS):
        return None
    return next((tflops * 1e12 for name, tflops in tflops_by_name.items() if name in card), None)
