"""AdamW with its parameter groups, and learning-rate schedules as pure functions step -> multiplier."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import nn

from trainer.schema import OptimConfig

Multiplier = Callable[[int], float]


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW over the model's trainable parameters, also sharded ones; only matrices decay.

    Fused: one kernel for all parameters, and the only variant that can skip a step on the device (`found_inf`).
    """
    return torch.optim.AdamW(
        parameter_groups(model.named_parameters(), config.weight_decay),
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )


def parameter_groups(named: Iterable[tuple[str, nn.Parameter]], weight_decay: float) -> list[dict]:
    """Two groups, empty ones left out: tensors of two and more dimensions decay, norms and biases do not."""
    trainable = [parameter for _, parameter in named if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def lr_multiplier(config: OptimConfig, total_steps: int) -> Multiplier:
    """The schedule as a function of the number of steps taken before (0 for the first step).

    The values are those of transformers' schedules of the same name: the warm-up starts at 0 (WSD: at
    `min_learning_rate`), and `total_steps` steps later the decay has reached `min_learning_rate`.
    """
    warmup = config.warmup_steps
    floor = config.min_learning_rate / config.learning_rate if config.learning_rate else 0.0
    if config.schedule == "constant":
        return _with_warmup(lambda step: 1.0, warmup)
    if config.schedule == "wsd":
        return _wsd(warmup, wsd_decay_steps(config, total_steps), total_steps, floor=floor)
    fall = {"cosine": _cosine, "linear": _linear}[config.schedule]
    return _with_warmup(lambda step: _above(floor, fall(_progress(step - warmup, total_steps - warmup))), warmup)


def wsd_decay_steps(config: OptimConfig, total_steps: int) -> int:
    """How many steps the final decay of a WSD schedule takes."""
    return max(1, total_steps // 5) if config.decay_steps is None else config.decay_steps


def _with_warmup(after: Multiplier, warmup: int) -> Multiplier:
    return lambda step: step / max(1, warmup) if step < warmup else after(step)


def _wsd(warmup: int, decay: int, total: int, *, floor: float) -> Multiplier:
    decay_start = max(warmup, total - decay)

    def multiplier(step: int) -> float:
        if step < warmup:
            return _above(floor, step / max(1, warmup))
        if step < decay_start:
            return 1.0
        if step < decay_start + decay:
            return _above(floor, _cosine(_progress(step - decay_start, decay)))
        return floor

    return multiplier


def _progress(step: int, length: int) -> float:
    return min(1.0, step / max(1, length))


def _cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def _linear(progress: float) -> float:
    return 1.0 - progress


def _above(floor: float, factor: float) -> float:
    """`factor` of the way from the floor to 1."""
    return factor * (1.0 - floor) + floor
