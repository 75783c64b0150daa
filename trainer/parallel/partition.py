"""Bytes that a compiled block keeps for its backward pass, as the compiler's partitioner chooses them.

The partitioner (torch._functorch.partitioners, read in torch 2.13) knows three answers: what makes the backward pass
fastest, also values that are cheap to make again; only what is dear to make (products, attention); and, for a smaller
budget, as many of the products as fit. A test compares this with what it really chooses for blocks of real widths.

Legend: n tokens of a micro-batch, c bytes of a product's dtype, D hidden, Q and K query and key-value widths,
I intermediate, H heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Literal

from torch import nn

from trainer.models.decoder import Block, Decoder, Linear
from trainer.models.lora import LoraSpec

FP32 = 4

Kind = Literal["cheap", "dear", "product"]


@dataclass(frozen=True)
class Value:
    """What a block computes and its backward pass reads."""

    kind: Kind
    """`cheap`: made again from the others by elementwise work. `product`: a matrix product. `dear`: neither, and what
    a small budget drops first: the partitioner counts no work for attention's outputs."""
    size: int
    """Bytes of storage that it keeps."""
    flops: float = 0.0
    """To make it again."""


@dataclass(frozen=True)
class Kept:
    """What stays from a block's forward, in bytes, without its input."""

    values: int
    casts: int
    """Of its weights, in the dtype of the products; independent of the tokens."""
    whole: int
    """The same with nothing made again, casts included: what is there while its backward pass runs."""


def kept_by(block: Block, decoder: Decoder, *, n: int, c: int, budget: float, casts: bool) -> Kept:
    """What stays of a compiled block. `casts`: it casts its fp32 weights itself, as it does without FSDP."""
    values = tuple(_values(block, decoder, n, c, fused=casts and _is_fused(block, c)))
    cast = _cast_sizes(block, c) if casts else (0, 0)
    everything = sum(value.size for value in values)
    budget = 1.0 if everything <= _freed_by_casts(block, c) * casts and budget > 0 else budget
    kept = kept_within(values, budget)
    light = sum(value.size for value in values if value.kind != "cheap")
    cast_kept = sum(cast) if budget >= 1 else cast[0] if kept >= light else 0
    return Kept(kept, cast_kept, everything + sum(cast))


def partition_budget(block: Block, decoder: Decoder, *, n: int, c: int, share: float, casts: bool) -> float:
    """The `activation_memory_budget` with which the partitioner keeps this share of a block's activations.

    It reckons with all that a forward leaves, less its inputs. Where those are fp32 weights of which casts are left, it
    takes the activations for smaller than they are, and would keep less.
    """
    everything = sum(value.size for value in _values(block, decoder, n, c, fused=casts and _is_fused(block, c)))
    less = _freed_by_casts(block, c) if casts else 0
    return share if share in (0, 1) or everything <= less else min(share * everything / (everything - less), 0.99)


def _freed_by_casts(block: Block, c: int) -> int:
    """By how much the casts of the weights are smaller than the weights."""
    cast = sum(_cast_sizes(block, c))
    return (FP32 - c) * cast // c


def kept_within(values: Sequence[Value], budget: float) -> int:
    """Bytes that the partitioner keeps of these for an `activation_memory_budget`."""
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
    """The size of the products within `room` that save most work: there are at most a dozen, so all are tried."""
    best = (0.0, 0)
    for choice in product((False, True), repeat=len(products)):
        taken = [value for value, chosen in zip(products, choice, strict=True) if chosen]
        size = sum(value.size for value in taken)
        if size <= room:
            best = max(best, (sum(value.flops for value in taken), size))
    return best[1]


def _values(block: Block, decoder: Decoder, n: int, c: int, *, fused: bool) -> Iterator[Value]:
    shape, attention, mlp = decoder.shape, block.self_attn, block.mlp
    wide, inner = shape.hidden_size, shape.intermediate_size
    query, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    flops = 2.0 * n * wide
    for readers in (projections, (mlp.gate_proj, mlp.up_proj)):
        yield Value("cheap", n * c * wide * any(map(keeps_input, readers)))  # the normed input
    turned = n * c * (query + kv)
    if fused:  # the values are a part of the one product, and keep all of it
        yield Value("product", n * c * (query + 2 * kv), flops * (query + 2 * kv))
    elif shape.qk_norm:
        yield from (Value("product", n * c * width, flops * width) for width in (query, kv, kv))
    else:  # queries and keys are kept after they are turned
        yield Value("product", n * c * kv, flops * kv)
    if fused or shape.qk_norm:
        yield Value("dear", turned)
    else:
        yield from (Value("product", n * c * width, flops * width) for width in (query, kv))
    yield Value("dear", n * (c * query + FP32 * shape.num_heads))  # attention's output and its logarithms of sums
    yield Value("cheap", n * c * query * keeps_input(attention.o_proj))  # the output again, head by head in a row
    yield Value("product", n * c * wide, 2.0 * n * query * wide)
    yield from (Value("product", n * c * inner, flops * inner) for _ in range(2))
    yield Value("cheap", n * c * inner * keeps_input(mlp.down_proj))
    yield Value("product", _adapters(block, decoder.lora, n, c))


def _adapters(block: Block, spec: LoraSpec | None, n: int, c: int) -> int:
    """The narrow products."""
    return 0 if spec is None else n * c * spec.rank * sum(linear.adapter is not None for linear in linears_of(block))


def _is_fused(block: Block, c: int) -> bool:
    """Whether queries, keys and values are one product (`trainer.models.decoder.products`): where weights are cast."""
    attention = block.self_attn
    return all(x.weight.element_size() != c for x in (attention.q_proj, attention.k_proj, attention.v_proj))


def _cast_sizes(block: Block, c: int) -> tuple[int, int]:
    """Bytes of the casts of the weights: those in one matrix with others, and those alone."""
    attention, mlp = block.self_attn, block.mlp
    together = (attention.q_proj, attention.k_proj, attention.v_proj)
    return _cast_size(together, c), _cast_size((attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj), c)


def _cast_size(modules: Sequence[nn.Module], c: int) -> int:
    return c * sum(p.numel() for module in modules for p in module.parameters() if p.element_size() != c)


def keeps_input(linear: Linear) -> bool:
    """Whether the backward pass of a product reads its input."""
    return linear.weight.requires_grad or linear.adapter is not None


def linears_of(block: Block) -> list[Linear]:
    """All products of a block."""
    attention, mlp = block.self_attn, block.mlp
    return [
        *(attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj),
        *(mlp.gate_proj, mlp.up_proj, mlp.down_proj),
    ]
