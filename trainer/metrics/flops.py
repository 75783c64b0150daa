"""The peak of a card, against which MFU is reckoned; the operations of a token are the model's own (`Model.flops`)."""

from __future__ import annotations

import torch

from trainer.dist import Dist
from trainer.schema import Config

PEAK_BF16_TFLOPS = {"H100": 989.0, "H200": 989.0, "A100": 312.0}
"""Dense bf16 peak per card, by a part of the name that CUDA reports (SXM figures of NVIDIA's data sheets)."""
SUSTAINED_BF16_TFLOPS = {"H100": 685.0, "H200": 685.0}
"""What products of a 7B model's width reach over seconds, when the card's power is the limit: measured on an H100 SXM
(700 W, torch 2.11), whose arithmetic an H200 shares. Short runs of products reach up to 800."""
LIMITED_VARIANTS = ("PCIe", "NVL", "MIG")
"""Variants of those cards with another peak."""


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
