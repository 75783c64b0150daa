"""Bytes that a compiled block keeps for its backward pass, as the compiler's partitioner chooses them.

The partitioner (torch._functorch.partitioners, read in torch 2.13) has three results: the values that make the backward
pass fastest, including those that are cheap to recompute; only expensive values (products, attention); and, for a
smaller budget, as many of the products as fit. A test compares this with its real choice for blocks of real widths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from trainer.models.figures import BlockMemory, Value


@dataclass(frozen=True)
class Kept:
    """The bytes that a block keeps from its forward, without its input."""

    values: int
    casts: int
    """Casts of its weights to the dtype of the products; independent of the number of tokens."""
    whole: int
    """The bytes if nothing is recomputed, casts included: they exist while the block's backward pass runs."""


def kept_by(block: BlockMemory, budget: float) -> Kept:
    """The bytes that a compiled block keeps for the backward pass."""
    everything = sum(value.size for value in block.values)
    budget = 1.0 if everything <= block.freed and budget > 0 else budget
    kept = kept_within(block.values, budget)
    light = sum(value.size for value in block.values if value.kind != "cheap")
    cast_kept = sum(block.casts) if budget >= 1 else block.casts[0] if kept >= light else 0
    return Kept(kept, cast_kept, everything + sum(block.casts))


def partition_budget(block: BlockMemory, share: float) -> float:
    """The `activation_memory_budget` with which the partitioner keeps this share of a block's activations.

    The partitioner counts all values that a forward leaves, less its inputs. If these are fp32 weights of which casts
    are left, it underestimates the activations, and would keep less.
    """
    everything = sum(value.size for value in block.values)
    if share in (0, 1) or everything <= block.freed:
        return share
    return min(share * everything / (everything - block.freed), 0.99)


def kept_within(values: Sequence[Value], budget: float) -> int:
    """The bytes of these values that the partitioner keeps for an `activation_memory_budget`."""
    everything = sum(value.size for value in values)
    if budget >= 1 or budget <= 0:
        return everything if budget >= 1 else 0
    dear = sum(value.size for value in values if value.kind != "cheap")
    if dear < budget * everything:
        return dear
    products = tuple(value for value in values if value.kind == "product")
    return _fullest(products, int(budget * everything))


@lru_cache(maxsize=256)
def _fullest(products: tuple[Value, ...], room: int) -> int:
    """The size of those products within `room` that save the most work. Tries all subsets of at most a dozen."""
    best = (0.0, 0)
    for choice in product((False, True), repeat=len(products)):
        taken = [value for value, chosen in zip(products, choice, strict=True) if chosen]
        size = sum(value.size for value in taken)
        if size <= room:
            best = max(best, (sum(value.flops for value in taken), size))
    return best[1]
