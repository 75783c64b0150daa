"""The plan for memory: the least recomputation with which a run fits into a GPU. Pure: estimates and bytes in, a choice
out.

Plans are tried from the fastest to the smallest. Keys that the config sets stay unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainer.config.parallel import recompute_mode
from trainer.schema import ParallelConfig
from trainer.words import GIB, render_bytes

MARGIN = 0.08
"""Share of a GPU's free memory for CUDA, NCCL, and gaps between the allocator's blocks."""
COMPILED_BUDGETS = (0.7, 0.5, 0.3, 0.0)
"""0.7: all products and attention are kept (0.6 of a block at the widths of today's models). 0: only a block's input,
which costs less than computing all of it again (`full`), by 6 % of a step of 7B on H100."""


@dataclass(frozen=True)
class MemoryPlan:
    """Values for the keys of `parallel` that concern memory."""

    activation_checkpointing: str
    activation_budget: float | None
    """With `activation_checkpointing` budget."""
    reduce_every_micro_batch: bool
    cpu_offload: bool
    keeps_gathered: bool = False
    """FSDP: parameters stay gathered from a step's first forward to its last backward. False: as the config sets it."""

    def applied(self, options: ParallelConfig) -> ParallelConfig:
        """The section with the values of this plan."""
        values: dict[str, Any] = {
            "activation_checkpointing": self.activation_checkpointing,
            "reduce_every_micro_batch": self.reduce_every_micro_batch,
            "cpu_offload": self.cpu_offload,
        }
        if self.activation_budget is not None:
            values["activation_budget"] = self.activation_budget
        if self.keeps_gathered:
            values["reshard_after_forward"] = False
        return replace(options, **values)

    def render(self) -> str:
        """`activation_checkpointing=budget (0.5), reduce_every_micro_batch`: its keys, and the switches that are on."""
        budget = "" if self.activation_budget is None else f" ({self.activation_budget:g})"
        words = [f"activation_checkpointing={self.activation_checkpointing}{budget}"]
        flags = {
            "reshard_after_forward=false": self.keeps_gathered,
            "reduce_every_micro_batch": self.reduce_every_micro_batch,
            "cpu_offload": self.cpu_offload,
        }
        return ", ".join([*words, *(name for name, on in flags.items() if on)])


@dataclass(frozen=True)
class Priced:
    """A plan and the bytes that each rank is estimated to need with it."""

    plan: MemoryPlan
    needs: int


@dataclass(frozen=True)
class Choice:
    """The chosen plan, and all plans that were possible."""

    priced: tuple[Priced, ...]
    """All possible plans, the fastest first."""
    index: int
    free: int
    """Free bytes at the start, of the GPU with the fewest."""
    failed: tuple[str, ...] = ()
    """Plans that ran out of memory in this run folder, as `MemoryPlan.render` names them."""

    @property
    def chosen(self) -> Priced:
        return self.priced[self.index]

    @property
    def fits(self) -> bool:
        return self.chosen.needs <= usable(self.free)

    @property
    def following(self) -> Choice | None:
        """The next choice after this one has run out of memory; None if this is the last."""
        if self.index + 1 == len(self.priced):
            return None
        return replace(self, index=self.index + 1, failed=(*self.failed, self.chosen.plan.render()))

    def render(self) -> str:
        """`memory: activation_checkpointing=budget (0.5): about 61.2 GiB of 79.1 free; …=none would need 83.4`."""
        chosen, fastest = self.chosen, self.priced[0]
        text = f"memory: {chosen.plan.render()}: about {_gib(chosen.needs)} GiB of {_gib(self.free)} free"
        if self.failed:
            text += f"; {self.failed[-1]} ran out of memory before"
        elif self.index:
            text += f"; {fastest.plan.render()} would need {_gib(fastest.needs)}"
        return text


def usable(free: int) -> int:
    """The part of `free` bytes that a run's tensors may take."""
    return int(free * (1 - MARGIN))


def possible_plans(options: ParallelConfig, *, backend: str, compiled: bool, accumulates: bool) -> list[MemoryPlan]:
    """The possible plans, the fastest first; set keys stay. `accumulates`: a step has several micro-batches.

    For each amount of recomputation, gradients first wait for the step's last micro-batch; in the next plan every
    micro-batch reduces them. That costs about 3 % of a step, less than more recomputation does. Without recomputation,
    and if no key decides it, parameters stay gathered in the first plans: that saves about 2 % of a step, and
    recomputation costs more.
    """
    fsdp = backend == "fsdp"
    reduces = [bool(options.reduce_every_micro_batch)]
    if fsdp and accumulates and options.reduce_every_micro_batch is None:
        reduces = [False, True]
    offload = bool(options.cpu_offload) and fsdp
    is_open = fsdp and options.sharding_strategy is None and options.reshard_after_forward is None
    plans = [
        MemoryPlan(mode, budget, every, offload, keeps)
        for mode, budget in _levels(options, compiled)
        for keeps in ([True, False] if is_open and mode == "none" else [False])
        for every in reduces
    ]
    if fsdp and options.cpu_offload is None:
        plans.append(replace(plans[-1], cpu_offload=True))
    return plans


def _levels(options: ParallelConfig, compiled: bool) -> list[tuple[str, float | None]]:
    """The modes of recomputation with their budgets, the fastest first."""
    if options.activation_checkpointing is not None:
        mode = recompute_mode(options)
        return [(mode, options.activation_budget if mode == "budget" else None)]
    if compiled:
        return [("none", None), *(("budget", budget) for budget in COMPILED_BUDGETS)]
    return [("none", None), ("selective", None), ("full", None)]


def choose_plan(
    plans: Sequence[MemoryPlan], needs: Callable[[MemoryPlan], int], *, free: int, failed: Collection[str] = ()
) -> Choice:
    """The first plan that comes after all failed ones and fits into `free` bytes minus a margin; else the last."""
    priced = tuple(Priced(plan, needs(plan)) for plan in plans)
    names = [one.plan.render() for one in priced]
    first = max((names.index(name) + 1 for name in failed if name in names), default=0)
    fitting = [i for i, one in enumerate(priced) if i >= first and one.needs <= usable(free)]
    return Choice(priced, fitting[0] if fitting else len(priced) - 1, free, tuple(n for n in failed if n in names))


def render_table(choice: Choice) -> list[str]:
    """The plans and their bytes, with a mark at the chosen one."""
    room = f"  of {_gib(choice.free)} GiB, {MARGIN:.0%} left for CUDA and between blocks"
    width = max(len(one.plan.render()) for one in choice.priced)
    rows = [
        f"  {'*' if i == choice.index else ' '} {one.plan.render():<{width}}{render_bytes(one.needs):>13}"
        f"{'' if one.needs <= usable(choice.free) else '  does not fit'}"
        for i, one in enumerate(choice.priced)
    ]
    return [*rows, room]


def _gib(size: int) -> str:
    return f"{size / GIB:.1f}"
