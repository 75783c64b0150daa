"""Learning-rate schedules as pure functions step -> multiplier, and the scaling of the rate with the batch."""

from __future__ import annotations

import math
from collections.abc import Callable

from trainer.config.train import warmup_steps
from trainer.schema import OptimConfig

Multiplier = Callable[[int], float]


def lr_multiplier(config: OptimConfig, total_steps: int) -> Multiplier:
    """The schedule as a function of the number of earlier steps (0 for the first step).

    The values are those of transformers' schedules of the same name: the warm-up starts at 0 (WSD: at
    `min_learning_rate`), and after `total_steps` steps the decay has reached `min_learning_rate`.
    """
    warmup = warmup_steps(config, total_steps)
    floor = config.min_learning_rate / settled_rate(config)
    if config.schedule == "constant":
        return _with_warmup(lambda step: 1.0, warmup)
    if config.schedule == "wsd":
        return _wsd(warmup, wsd_decay_steps(config, total_steps), total_steps, floor=floor)
    fall = {"cosine": _cosine, "linear": _linear}[config.schedule]
    return _with_warmup(lambda step: _above(floor, fall(_progress(step - warmup, total_steps - warmup))), warmup)


def settled_rate(config: OptimConfig) -> float:
    """The learning rate of a resolved config (`trainer.train.resolve_defaults`)."""
    if config.learning_rate is None:
        raise ValueError("optim.learning_rate is null, which a run settles before it asks for the rate")
    return config.learning_rate


def peak_learning_rate(config: OptimConfig, rows: int) -> float:
    """`learning_rate` for steps of `rows` rows, scaled by the rule of `lr_scaling`."""
    return settled_rate(config) * _batch_factor(config, rows)


def render_lr_scaling(config: OptimConfig, rows: int) -> list[str]:
    """A line with the scaling rule and its numbers; empty without a rule."""
    if config.lr_scaling == "none":
        return []
    ratio = f"{rows} / {config.base_batch_size}"
    factor = f"sqrt({ratio})" if config.lr_scaling == "sqrt" else f"({ratio})"
    peak = f"learning rate {settled_rate(config):g} x {factor} = {peak_learning_rate(config, rows):g}"
    return [f"{peak}: {config.lr_scaling} scaling, {rows} rows a step, tuned for {config.base_batch_size}"]


def _batch_factor(config: OptimConfig, rows: int) -> float:
    """The factor of `lr_scaling`. Linear: arXiv 1706.02677, for SGD. Square root: arXiv 2205.10287, for Adam."""
    if config.lr_scaling == "none" or config.base_batch_size is None:
        return 1.0
    ratio = rows / config.base_batch_size
    return math.sqrt(ratio) if config.lr_scaling == "sqrt" else ratio


def wsd_decay_steps(config: OptimConfig, total_steps: int) -> int:
    """Number of steps of a WSD schedule's final decay."""
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
    """Interpolates between the floor and 1."""
    return factor * (1.0 - floor) + floor
