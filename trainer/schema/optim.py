"""The section `optim`: how fast which parameters are trained."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class GroupConfig:
    """Optimizer settings of some parameters; the first group whose pattern matches a parameter has it."""

    pattern: str
    """`*`, `?` and `[0-3]` in Hugging Face's parameter names: `lm_head.*`, `*.lora_B.weight`."""
    lr_scale: float = 1.0
    """Their learning rate is the scheduled one times this."""
    weight_decay: float | None = None
    """In place of optim.weight_decay; one-dimensional parameters do not decay here either. None: optim.weight_decay."""


@dataclass(frozen=True)
class OptimConfig:
    """AdamW and its schedule."""

    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    """`adamw8bit`: torchao's, whose state takes 2 bytes a parameter in place of 8 (extra `lowbit`)."""
    learning_rate: float = 1e-3
    """At the end of the warm-up."""
    min_learning_rate: float = 0.0
    """Where the decay ends, same unit as learning_rate."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """How the learning rate falls after the warm-up. wsd: it stays, and falls in the last `decay_steps` (a cosine)."""
    warmup_steps: int | None = None
    """Steps in which the learning rate rises linearly from 0 (wsd: from min_learning_rate); null: 10, and never more
    than a fifth of the run."""
    decay_steps: int | None = None
    """WSD only: length of the final decay; None: a fifth of all steps."""
    beta1: float = 0.9
    """Decay of Adam's mean of the gradients."""
    beta2: float = 0.95
    """Decay of Adam's mean of their squares."""
    eps: float = 1e-8
    """Added to the root of Adam's second mean."""
    weight_decay: float = 0.01
    """Decoupled; not applied to norms, biases and other one-dimensional parameters."""
    max_grad_norm: float = 1.0
    """Global norm; 0: no clipping."""
    groups: list[GroupConfig] = field(default_factory=list)
    """Parameters with a learning rate or weight decay of their own: {pattern, lr_scale, weight_decay}, first match."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """How learning_rate and min_learning_rate grow with the batch: times rows per step / base_batch_size (`linear`), or
    its square root (`sqrt`, the rule for Adam)."""
    base_batch_size: int | None = None
    """Rows per step that learning_rate was tuned for; needed by lr_scaling."""
