"""The optimizer that a config asks for, over what this rank holds of each sharded parameter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from trainer.kernels.adamw8bit import BLOCK
from trainer.optim.groups import parameter_groups
from trainer.optim.low_bit import build_adamw8bit, is_quantised
from trainer.schema import OptimConfig
from trainer.tensors import local_tensor


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


class ShardAdamW(torch.optim.AdamW):
    """Its state is sharded as the parameters are; its step sees this rank's shards as plain tensors.

    An update needs nothing of other ranks. Among DTensors torch makes a DTensorSpec for each parameter's step count
    anew, milliseconds of the host, and torch 2.11 keeps them all (https://github.com/pytorch/pytorch/issues/188174).
    """

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        has_complex: bool = super()._init_group(group, *lists)  # type: ignore[no-untyped-call]
        for tensors in lists:
            tensors[:] = [local_tensor(tensor) for tensor in tensors]
        return has_complex
