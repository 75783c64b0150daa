"""The optimizer of a config, with its parameter groups, over this rank's part of each sharded parameter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainer.errors import ConfigError
from trainer.kernels.adamw8bit import BLOCK
from trainer.models.patterns import matching
from trainer.optim.low_bit import build_adamw8bit, is_quantised
from trainer.optim.schedules import settled_rate
from trainer.schema import GroupConfig, OptimConfig
from trainer.tensors import local_tensor

Named = dict[str, nn.Parameter]


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """AdamW over the model's trainable parameters, sharded or not, in the groups of `config`.

    Its state has the dtype of the parameters, so these must be fp32: bf16 moments lose small updates.
    """
    wrong = [name for name, p in model.named_parameters() if p.requires_grad and p.dtype != torch.float32]
    if wrong:
        raise ValueError(f"trained parameters must be stored in fp32, not as {', '.join(wrong[:3])} are")
    groups = parameter_groups(model.named_parameters(), config)
    lr, betas, eps = settled_rate(config), (config.beta1, config.beta2), config.eps
    if config.optimizer == "adamw8bit":
        return build_adamw8bit(groups, lr=lr, betas=betas, eps=eps, in_fp32=_kept_in_fp32(model, config))
    # fused: one kernel for all parameters, and the only variant that can skip a step on the device (`found_inf`)
    return ShardAdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)


def state_bytes(model: nn.Module, config: OptimConfig) -> float:
    """Bytes of the optimizer's state per trained parameter, on average: two fp32 moments; a quantised moment has one
    byte per value and an fp32 scale per block."""
    trained = [p for p in model.parameters() if p.requires_grad]
    total, small = sum(p.numel() for p in trained), 0
    if config.optimizer == "adamw8bit":
        large = _kept_in_fp32(model, config)
        small = sum(p.numel() for p in trained if is_quantised(p) and id(p) not in large)
    return 2 * (4 * (total - small) + (1 + 4 / BLOCK) * small) / max(1, total)


def had_8bit_embeddings(saved: Mapping[str, Any]) -> bool:
    """Whether a run with this section `optim` kept 8-bit state for embeddings: before the key existed, 8-bit AdamW
    always did."""
    return saved.get("optimizer") == "adamw8bit" and bool(saved.get("embeddings_8bit", True))


def _kept_in_fp32(model: nn.Module, config: OptimConfig) -> frozenset[int]:
    """The ids of the parameters whose state stays fp32 under 8-bit AdamW: embeddings, as bitsandbytes advises."""
    if config.embeddings_8bit:
        return frozenset()
    return frozenset(id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding))


class ShardAdamW(torch.optim.AdamW):
    """AdamW whose state is sharded as the parameters are, and whose step gets this rank's shards as plain tensors.

    An update needs no data of other ranks. With DTensors, every step torch creates a DTensorSpec for each parameter's
    step count. That takes the host milliseconds, and torch 2.11 never frees them
    (https://github.com/pytorch/pytorch/issues/188174).
    """

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        has_complex: bool = super()._init_group(group, *lists)  # type: ignore[no-untyped-call]
        for tensors in lists:
            tensors[:] = [local_tensor(tensor) for tensor in tensors]
        return has_complex


# --- groups of parameters --------------------------------------------------------------------------------------------


def parameter_groups(named: Iterable[tuple[str, nn.Parameter]], config: OptimConfig) -> list[dict[str, Any]]:
    """torch's parameter groups of the trained parameters, without empty ones.

    A parameter belongs to the first entry of `optim.groups` that matches, else to the rest. In each, tensors of two or
    more dimensions decay; norms and biases do not. A group's rate is the scheduled one times its `lr_scale`.
    Raises ConfigError for a pattern that gets no parameter.
    """
    left: Named = {name.removeprefix("module."): p for name, p in named if p.requires_grad}
    everything, groups = list(left), []
    for i, group in enumerate(config.groups):
        found = matching(group.pattern, everything, f"optim.groups[{i}].pattern")
        mine = {name: left.pop(name) for name in found if name in left}
        if not mine:
            message = f"optim.groups[{i}] has {group.pattern!r}, and groups before it have all {len(found)} it matches"
            raise ConfigError(
                message, hint="the first group that matches a parameter has it; put the narrower one first"
            )
        groups += _by_decay(mine, group, config.weight_decay)
    groups += _by_decay(left, GroupConfig("*"), config.weight_decay)
    return [group for group in groups if group["params"]]


def _by_decay(named: Named, group: GroupConfig, weight_decay: float) -> list[dict[str, Any]]:
    decay = weight_decay if group.weight_decay is None else group.weight_decay
    shared = {"lr_scale": group.lr_scale, "pattern": group.pattern}
    matrices, vectors = ([p for p in named.values() if (p.ndim >= 2) == is_matrix] for is_matrix in (True, False))
    return [
        {"params": matrices, "weight_decay": decay, **shared},
        {"params": vectors, "weight_decay": 0.0, **shared},
    ]


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set every group's rate to its multiple of the scheduled rate."""
    for group in optimizer.param_groups:
        value = lr * group.get("lr_scale", 1.0)
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(value)
        else:
            group["lr"] = value


def render_groups(groups: list[dict[str, Any]]) -> list[str]:
    """A line for each parameter group of an optimizer, if `optim.groups` is set."""
    if {group.get("pattern", "*") for group in groups} == {"*"}:
        return []
    return [_render(group) for group in groups]


def _render(group: dict[str, Any]) -> str:
    params = group["params"]
    count = f"{len(params)} tensor{'s' * (len(params) > 1)}, {sum(p.numel() for p in params):,} parameters"
    return (
        f"optimizer group {group['pattern']}: {count}, learning rate x {group['lr_scale']:g},"
        f" weight decay {group['weight_decay']:g}"
    )
