"""The section `optim`: how fast which parameters are trained."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from trainer.schema.key import ABOVE_0, AT_LEAST_0, AT_LEAST_1, SHARE, key


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
    embeddings_8bit: bool | None = None
    """adamw8bit only: 8-bit state for embeddings too. None: as in the checkpoint that the run resumes, else false. (Why
    false: a rare token's moments are tiny beside its neighbours', 8 bits lose them, and its next update is far too
    large.)"""
    learning_rate: float | None = key(None, limit=ABOVE_0, aliases=("lr",))
    """At the end of the warm-up. None: that of the checkpoint that the run resumes; else 1e-3 for random weights, 2e-4
    for LoRA, 1e-5 for the weights of a pretrained model."""
    min_learning_rate: float = key(0.0, limit=AT_LEAST_0)
    """Where the decay ends, same unit as learning_rate."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = key("cosine", aliases=("lr_scheduler_type",))
    """How the learning rate falls after the warm-up. wsd: it stays, and falls in the last `decay_steps` (a cosine)."""
    warmup_steps: int | None = key(None, limit=AT_LEAST_0)
    """Steps in which the learning rate rises linearly from 0 (wsd: from min_learning_rate); None: 10, or a fifth of
    the run if that is less."""
    decay_steps: int | None = key(None, limit=AT_LEAST_1)
    """WSD only: length of the final decay; None: a fifth of all steps."""
    beta1: float = key(0.9, limit=SHARE, aliases=("adam_beta1",))
    """Decay of Adam's mean of the gradients."""
    beta2: float = key(0.95, limit=SHARE, aliases=("adam_beta2",))
    """Decay of Adam's mean of their squares."""
    eps: float = key(1e-8, limit=ABOVE_0, aliases=("adam_epsilon",))
    """Added to the root of Adam's second mean."""
    weight_decay: float = key(0.01, limit=AT_LEAST_0)
    """Decoupled; not applied to norms, biases and other one-dimensional parameters."""
    max_grad_norm: float = key(1.0, limit=AT_LEAST_0, aliases=("clip_grad_norm", "grad_clip"))
    """Global norm; 0: no clipping."""
    groups: list[GroupConfig] = field(default_factory=list)
    """Parameters with another learning rate or weight decay: {pattern, lr_scale, weight_decay}, first match."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """How learning_rate and min_learning_rate grow with the batch: times rows per step / base_batch_size (`linear`), or
    its square root (`sqrt`, the rule for Adam)."""
    base_batch_size: int | None = key(None, limit=AT_LEAST_1)
    """Rows per step that learning_rate was tuned for; needed by lr_scaling."""
