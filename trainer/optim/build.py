"""The optimizer that a config asks for."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from trainer.kernels.adamw8bit import BLOCK
from trainer.optim.groups import parameter_groups
from trainer.optim.low_bit import build_adamw8bit, is_quantised
from trainer.optim.shards import ShardAdamW
from trainer.schema import OptimConfig


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """AdamW over the model's trainable parameters, also sharded ones, in the groups that `config` says.

    Its state has the dtype of the parameters, so these must be fp32: bf16 moments lose small updates.
    """
    wrong = [name for name, p in model.named_parameters() if p.requires_grad and p.dtype != torch.float32]
    if wrong:
        raise ValueError(f"trained parameters must be stored in fp32, not as {', '.join(wrong[:3])} are")
    groups = parameter_groups(model.named_parameters(), config)
    lr, betas, eps = config.learning_rate, (config.beta1, config.beta2), config.eps
    if config.optimizer == "adamw8bit":
        return build_adamw8bit(groups, lr=lr, betas=betas, eps=eps)
    # fused: one kernel for all parameters, and the only variant that can skip a step on the device (`found_inf`)
    return ShardAdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)


def state_bytes(parameters: Iterable[Tensor], config: OptimConfig) -> float:
    """Bytes of the optimizer's state for a trained parameter, on average: two fp32 moments, or a byte a value and an
    fp32 scale a block where they are quantised."""
    trained = [p for p in parameters if p.requires_grad]
    total = sum(p.numel() for p in trained)
    small = sum(p.numel() for p in trained if is_quantised(p)) if config.optimizer == "adamw8bit" else 0
    return 2 * (4 * (total - small) + (1 + 4 / BLOCK) * small) / max(1, total)
