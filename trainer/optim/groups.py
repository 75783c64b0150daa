"""Which parameters share a learning rate and a weight decay."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from trainer.errors import ConfigError
from trainer.models.patterns import matching
from trainer.schema import GroupConfig, OptimConfig

Named = dict[str, nn.Parameter]


def parameter_groups(named: Iterable[tuple[str, nn.Parameter]], config: OptimConfig) -> list[dict[str, Any]]:
    """torch's parameter groups of what is trained, empty ones left out.

    The parameters of each entry of `optim.groups`, the first that matches, then the rest; of each, tensors of two and
    more dimensions decay, norms and biases do not. A group's rate is the scheduled one times its `lr_scale`.
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
    """Give every group its own multiple of the scheduled rate."""
    for group in optimizer.param_groups:
        value = lr * group.get("lr_scale", 1.0)
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(value)
        else:
            group["lr"] = value


def render_groups(groups: list[dict[str, Any]]) -> list[str]:
    """A line for each of an optimizer's groups of parameters, where `optim.groups` asked for any."""
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
