"""The optimizer that a config asks for."""

from __future__ import annotations

import torch
from torch import nn

from trainer.optim.groups import parameter_groups
from trainer.optim.low_bit import build_adamw8bit
from trainer.schema import OptimConfig


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """AdamW over the model's trainable parameters, also sharded ones, in the groups that `config` says.

    Its state has the dtype of the parameters, so these must be fp32: bf16 moments lose small updates.
    """
    wrong = [name for name, p in model.named_parameters() if p.requires_grad and p.dtype != torch.float32]
    if wrong:
        raise ValueError(f"trained parameters must be stored in fp32, not as {', '.join(wrong[:3])} are")
    groups = parameter_groups(model.named_parameters(), config)
    settings = {"lr": config.learning_rate, "betas": (config.beta1, config.beta2), "eps": config.eps}
    if config.optimizer == "adamw8bit":
        return build_adamw8bit(groups, settings)
    # fused: one kernel for all parameters, and the only variant that can skip a step on the device (`found_inf`)
    return torch.optim.AdamW(groups, **settings, fused=True)
