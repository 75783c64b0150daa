"""Decides which parameters are stored, gathered and reduced together. Without side effects.

The plan is made from a model on the meta device, so that `--inspect` can show it for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import ceil
from typing import Any

import torch
from torch import nn

from trainer.config.parallel import Sharding, backend_of, sharding
from trainer.errors import ConfigError
from trainer.models.patterns import matching
from trainer.models.protocol import Model
from trainer.optim.build import state_bytes
from trainer.parallel.plan import HEAD, ROOT, Group, WrapPlan
from trainer.schema import Config, ParallelConfig
from trainer.tensors import DTYPES
from trainer.words import first_few


def plan_wrapping(model: Model, config: Config, world_size: int) -> WrapPlan:
    """The plan for a model with this config on `world_size` ranks.

    Raises ConfigError if `parallel` names classes or modules that the model does not have, or requires groups so large
    that there are none.
    """
    options, backend = config.parallel, backend_of(config, world_size)
    how = sharding(options)
    replicas = {"pytorch": 1, "ddp": world_size}.get(backend, (options.dp_replicate or 1) if how.hybrid else 1)
    planner = _Planner(model, options, shards=world_size // replicas, dtype=DTYPES[config.train.precision])
    fsdp = backend == "fsdp"
    return WrapPlan(
        backend=backend,
        strategy=how.word if fsdp else "(NO_SHARD)" if how.replicated and backend == "ddp" else "",
        shards=planner.shards,
        replicas=replicas,
        groups=planner.groups(how) if fsdp else (planner.whole(),),
        ignored=planner.ignored_group() if fsdp else None,
        compute_dtype=config.train.precision,
        reduce_dtype=options.reduce_dtype,
        reduce_bytes=DTYPES[options.reduce_dtype].itemsize,
        state_bytes=state_bytes(model, config.optim),
        forward_ahead=int(options.forward_prefetch) if fsdp else 0,
        backward_ahead=options.backward_prefetch_depth if fsdp else 0,
        offloaded=bool(options.cpu_offload) and fsdp,
        reduces_every=bool(options.reduce_every_micro_batch) and fsdp,
    )


def replan(plan: WrapPlan, config: Config) -> WrapPlan:
    """The plan with the new config's settings that do not move parameters: what stays gathered, and when to reduce."""
    if plan.backend != "fsdp":
        return plan
    how = sharding(config.parallel)
    return replace(
        plan,
        strategy=how.word,
        groups=tuple(
            replace(group, kept=_kept(group.name, how)) if group.needed_again else group for group in plan.groups
        ),
        reduces_every=bool(config.parallel.reduce_every_micro_batch),
    )


def ignored_names(model: nn.Module, patterns: Iterable[str]) -> list[str]:
    """The names of the modules that match the patterns. Raises ConfigError for a pattern without a match."""
    names = [name for name, _ in model.named_modules() if name]
    found = [name for pattern in patterns for name in matching(pattern, names, "parallel.ignored_modules")]
    return list(dict.fromkeys(found))


class _Planner:
    """Chooses the groups of one model and measures them."""

    def __init__(self, model: Model, options: ParallelConfig, *, shards: int, dtype: torch.dtype) -> None:
        self.model, self.options, self.shards, self.dtype = model, options, shards, dtype
        self.units = model.units()
        self.wrappable = {n: m for n, m in model.named_modules() if n and m not in self.units.inseparable}

    def groups(self, how: Sharding) -> tuple[Group, ...]:
        """The chosen modules bottom-up, then the root; without groups that have no parameters."""
        taken = {id(p) for p in self._ignored()}
        found = []
        for name in [*sorted(self._chosen(), key=lambda name: -name.count(".")), ROOT]:
            own = [p for p in self.model.get_submodule(name).parameters() if id(p) not in taken]
            taken |= {id(p) for p in own}
            if own or name == ROOT:
                found.append(self._measure(name, own, **self._fate(name, how)))
        return tuple(found)

    def _fate(self, name: str, how: Sharding) -> dict[str, Any]:
        """What happens to a group's gathered copy after the forward: an embedding's is not needed again."""
        if isinstance(self.model.get_submodule(name), nn.Embedding):
            return {"kept": False, "needed_again": False}
        return {"kept": _kept(name, how)}

    def whole(self) -> Group:
        """The whole model as one group, used as it is stored."""
        return self._measure(ROOT, list(self.model.parameters()), shards=1, gathered=False)

    def ignored_group(self) -> Group | None:
        own = self._ignored()
        return self._measure(", ".join(self.options.ignored_modules), own, shards=1, gathered=False) if own else None

    def _ignored(self) -> list[nn.Parameter]:
        names = ignored_names(self.model, self.options.ignored_modules)
        return list(dict.fromkeys(p for name in names for p in self.model.get_submodule(name).parameters()))

    def _chosen(self) -> list[str]:
        policy = self.options.wrap_policy
        if policy == "size":
            return self._by_size()
        if policy == "transformer":
            return [name for name, module in self.wrappable.items() if module in self.units.sharded]
        classes = self._classes()
        return [name for name, module in self.wrappable.items() if type(module).__name__ in classes]

    def _classes(self) -> set[str]:
        present = {type(module).__name__ for module in self.wrappable.values()}
        known = {name: name for name in present}
        known |= {theirs: ours for theirs, ours in self.model.hf_classes().items() if ours in present}
        unknown = [name for name in self.options.wrap_classes if name not in known]
        if unknown:
            message = f"parallel.wrap_classes names {first_few(unknown, 5)}, no class of this model that can be a group"
            raise ConfigError(message, hint=f"known: {first_few(sorted(known), 20)}")
        return {known[name] for name in self.options.wrap_classes}

    def _by_size(self) -> list[str]:
        """FSDP1's rule: a module is a group if its parameters outside of lower groups are at least `min_num_params`."""
        least, chosen = self.options.min_num_params, []
        rest: dict[str, int] = {}
        for name, module in reversed(list(self.model.named_modules())):  # children before their parents
            own = sum(p.numel() for p in module.parameters(recurse=False))
            below = sum(rest[f"{name}.{child}" if name else child] for child, _ in module.named_children())
            rest[name] = own + below
            if name in self.wrappable and rest[name] >= least:
                chosen.append(name)
                rest[name] = 0
        if not chosen:
            largest = max(sum(p.numel() for p in module.parameters()) for module in self.wrappable.values())
            message = (
                f"parallel.min_num_params is {least:,}, and the largest module that can be a group has {largest:,}"
            )
            raise ConfigError(message, hint=f"set it to at most {largest}, or use parallel.wrap_policy=transformer")
        return chosen

    def _measure(
        self,
        name: str,
        own: list[nn.Parameter],
        *,
        kept: bool | int = True,
        needed_again: bool = True,
        shards: int | None = None,
        gathered: bool = True,
    ) -> Group:
        ranks = self.shards if shards is None else shards
        local = [_largest_share(p, ranks) for p in own]
        trainable = [p.requires_grad for p in own]
        return Group(
            name=name,
            params=sum(p.numel() for p in own),
            trainable=sum(p.numel() for p in own if p.requires_grad),
            local_params=sum(local),
            local_trainable=sum(size for size, trains in zip(local, trainable, strict=True) if trains),
            local_bytes=sum(size * p.element_size() for size, p in zip(local, own, strict=True)),
            gathered_bytes=sum(p.numel() for p in own) * self.dtype.itemsize if gathered else 0,
            kept=kept,
            needed_again=needed_again,
        )


def _kept(name: str, how: Sharding) -> bool | int:
    """`Group.kept` for a group; root and head stay gathered, because they are used again at once."""
    if name in (ROOT, HEAD):
        return True
    return not how.reshard if isinstance(how.reshard, bool) else how.reshard


def _largest_share(parameter: nn.Parameter, ranks: int) -> int:
    rows = parameter.shape[0]
    return ceil(rows / ranks) * (parameter.numel() // rows) if rows else 0
