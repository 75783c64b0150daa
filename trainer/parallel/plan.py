"""A wrap plan as a value: the bytes and traffic of each group of parameters, and the plan as text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

MIB = 2**20
ROOT, HEAD = "", "lm_head"


@dataclass(frozen=True)
class Group:
    """Parameters that are gathered in one collective and reduced in another."""

    name: str
    """Hugging Face's name of the module; empty: the root, which has the parameters of no other group."""
    params: int
    trainable: int
    local_params: int
    """The largest number on one rank: shards of a tensor are whole rows, and the first rank has the most."""
    local_trainable: int
    local_bytes: int
    gathered_bytes: int
    """Bytes of the gathered copy in the compute dtype; 0 if the stored parameters are used directly."""
    kept: bool | int
    """After the forward: gathered until the step's last backward (True), freed (False), or sharded over this many
    ranks (an int)."""
    needed_again: bool = True
    """Whether the backward needs the parameters: an embedding's does not."""


@dataclass(frozen=True)
class WrapPlan:
    """How a model is distributed over the ranks, in numbers. Sizes are those of the rank with the most."""

    backend: str
    strategy: str
    shards: int
    """Ranks that share one copy of the parameters."""
    replicas: int
    """The number of copies of the parameters."""
    groups: tuple[Group, ...]
    ignored: Group | None
    """The parameters of `ignored_modules`, which are whole on every rank."""
    compute_dtype: str
    reduce_dtype: str
    reduce_bytes: int
    """Bytes of one gradient entry in the reduction."""
    state_bytes: float
    """Bytes of the optimizer's state for one trained parameter."""
    forward_ahead: int
    backward_ahead: int
    offloaded: bool
    reduces_every: bool
    """Reduce the gradients of each micro-batch, instead of once per step."""

    @property
    def all_groups(self) -> tuple[Group, ...]:
        return self.groups if self.ignored is None else (*self.groups, self.ignored)

    @property
    def params(self) -> int:
        return sum(group.params for group in self.all_groups)

    @property
    def local_params(self) -> int:
        return sum(group.local_params for group in self.all_groups)

    @property
    def local_trainable(self) -> int:
        return sum(group.local_trainable for group in self.all_groups)

    @property
    def local_bytes(self) -> int:
        """Bytes of the parameters that this rank stores."""
        return sum(group.local_bytes for group in self.all_groups)

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of the optimizer's state on this rank's device, which the first step allocates."""
        return 0 if self.offloaded else round(self.state_bytes * self.local_trainable)

    @property
    def peak_gathered_bytes(self) -> int:
        """Bytes of gathered copies that exist at the same time: all kept ones, and of the freed ones those in use or
        gathered ahead."""
        freed = sorted((group.gathered_bytes for group in self.groups if group.kept is not True), reverse=True)
        kept = sum(group.gathered_bytes // int(group.kept) for group in self.groups if group.kept)
        return kept + sum(freed[: 1 + max(1, self.forward_ahead, self.backward_ahead)])

    @property
    def unsharded_grad_bytes(self) -> int:
        """Bytes of unsharded gradients kept between a step's micro-batches, so that each is reduced once; 0 if the
        model is not sharded."""
        if self.backend != "fsdp" or self.reduces_every:
            return 0
        return self.reduce_bytes * sum(group.trainable for group in self.groups)

    @property
    def gather_bytes_per_micro_batch(self) -> float:
        """Bytes that a rank receives in forward and backward to gather the groups that it does not keep."""
        return sum(
            group.gathered_bytes * _passes(group, self.shards) for group in self.groups if group.kept is not True
        )

    @property
    def gather_bytes_per_step(self) -> float:
        """Bytes that it receives for groups that it keeps from the step's first forward to its last backward."""
        return sum(group.gathered_bytes for group in self.groups if group.kept is True) * _others(self.shards)

    @property
    def reduce_bytes_each(self) -> float:
        """Bytes that a rank sends to reduce gradients once: reduce-scatter within a copy, all-reduce over copies
        (rings)."""
        ranks = self.shards * self.replicas
        scattered = sum(group.trainable for group in self.groups) * _others(self.shards)
        summed = 2 * sum(group.local_trainable for group in self.groups) * _others(self.replicas)
        whole = 2 * (self.ignored.trainable if self.ignored else 0) * _others(ranks)
        return self.reduce_bytes * (scattered + summed + whole)

    def render(self) -> list[str]:
        """The plan in a few lines."""
        lines = [self._what(), *self._group_lines(), self._bytes()]
        if self.shards * self.replicas > 1:
            lines.append(self._traffic())
        if self.unsharded_grad_bytes:
            size = self.unsharded_grad_bytes / MIB
            lines.append(f"with several micro-batches a step, whole gradients wait between them: {size:.1f} MiB")
        return lines

    def _what(self) -> str:
        ranks = self.shards * self.replicas
        how = f"{self.backend} {self.strategy}".strip()
        mesh = (
            f" as {self.replicas} replicas x {self.shards} shards"
            if self.backend == "fsdp" and self.replicas > 1
            else ""
        )
        reduced = f", gradients summed in {self.reduce_dtype}" if ranks > 1 or self.backend != "pytorch" else ""
        ahead = ""
        if self.backend == "fsdp" and (self.forward_ahead, self.backward_ahead) != (0, 1):
            ahead = f", gathered ahead: {self.forward_ahead} forward, {self.backward_ahead} backward"
        dtypes = f"products in {self.compute_dtype}{reduced}"
        return f"{how}, {ranks} rank(s){mesh}: {self.params:,} parameters, {dtypes}{ahead}"

    def _group_lines(self) -> Iterator[str]:
        if self.backend == "fsdp":
            for names, group in _alike(self.groups):
                yield f"  {names} of {group.params:,} parameters, {_after(group.kept, group.needed_again)}"
        if self.ignored is not None:
            yield f"  {self.ignored.name}: {self.ignored.params:,} parameters, whole on every rank"

    def _bytes(self) -> str:
        stored, grads = self.local_bytes / MIB, 4 * self.local_trainable / MIB
        state = self.state_bytes * self.local_trainable / MIB
        where = "on the CPU" if self.offloaded else "this rank"
        gathered = f", gathered at once {self.peak_gathered_bytes / MIB:.1f} MiB" if self.peak_gathered_bytes else ""
        note = "; nothing is sharded: FULL_SHARD needs less" if self.strategy == "(NO_SHARD)" else ""
        return (
            f"{where}: {self.local_params:,} parameters, {stored:.1f} MiB, gradients {grads:.1f} MiB,"
            f" AdamW state {state:.1f} MiB{gathered}{note}"
        )

    def _traffic(self) -> str:
        gathered = [(self.gather_bytes_per_micro_batch, "micro-batch"), (self.gather_bytes_per_step, "step")]
        words = [f"{size / MIB:.1f} MiB gathered a {when}" for size, when in gathered if size]
        words.append(
            f"{self.reduce_bytes_each / MIB:.1f} MiB reduced a {'micro-batch' if self.reduces_every else 'step'}"
        )
        return f"traffic of a rank: {', '.join(words)}"


def _others(ranks: int) -> float:
    """The share of a tensor that the other ranks of a ring hold."""
    return (ranks - 1) / ranks


def _passes(group: Group, shards: int) -> float:
    """How often a micro-batch gathers a group, times the other ranks' share: in forward, and in backward if needed."""
    forward = _others(shards)
    if not group.needed_again:
        return forward
    return forward + _others(group.kept) if group.kept else 2 * forward


def _after(kept: bool | int, needed_again: bool) -> str:
    if not needed_again:
        return "freed after forward, not needed again"
    if kept is True:
        return "kept after forward"
    return "freed after forward" if kept is False else f"kept over {kept} ranks after forward"


def _alike(groups: tuple[Group, ...]) -> Iterator[tuple[str, Group]]:
    """Groups with the same name pattern, size and `kept` together: `model.layers.*: 28 groups`; the root last."""
    kinds: dict[tuple[str, int, bool | int], list[Group]] = {}
    for group in groups:
        kinds.setdefault((re.sub(r"\d+", "*", group.name), group.params, group.kept), []).append(group)
    for (name, *_), alike in kinds.items():
        if name == ROOT:
            yield "root: a group", alike[0]
        else:
            yield (f"{name}: {len(alike)} groups" if len(alike) > 1 else f"{alike[0].name}: a group"), alike[0]
