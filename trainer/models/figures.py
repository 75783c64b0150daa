"""A model's figures for planning: operations per token, bytes for the backward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainer.config.batch import BatchRules
from trainer.schema import Config
from trainer.tensors import DTYPES

FP32 = 4
"""Bytes of an fp32 value."""


@dataclass(frozen=True)
class Flops:
    """Floating point operations of training, forward and backward: products with weights, and attention within each
    document, without a discount for causality (the convention of the PaLM paper, appendix B)."""

    products: float
    """Per token: 6 for each parameter that multiplies."""
    head: float
    """The part of them that only a token with a label needs; MFU counts it for every token, as is usual."""
    attention: float
    """For each pair of a token and a token of its document: 12·L·H·Dh."""

    def per_token(self, mean_length: float) -> float:
        """`mean_length`: the mean over tokens of their document's length: sum of squared lengths / sum of lengths."""
        return self.products + self.attention * mean_length


NO_FLOPS = Flops(0.0, 0.0, 0.0)


# --- memory ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Micro:
    """The properties of a micro-batch, and of the code that runs it, that decide its bytes."""

    n: int
    """Tokens."""
    seq_len: int
    packed: bool
    """Whether rows hold several documents."""
    c: int
    """Bytes of a value in the dtype of products."""
    triton: bool
    """Whether packed attention needs no dense mask, and the loss no logits in fp32."""
    compiled: bool
    gathered: bool
    """Whether FSDP gathers the weights, which also casts them; else a block casts those stored in another dtype."""

    @classmethod
    def of(cls, config: Config, *, triton: bool, compiled: bool, gathered: bool) -> Micro:
        """The micro-batch of a config."""
        rules, c = BatchRules.of(config), DTYPES[config.train.precision].itemsize
        return cls(rules.tokens, rules.seq_len, rules.packing, c, triton, compiled, gathered)


@dataclass(frozen=True)
class Value:
    """A value that a block computes and its backward pass reads."""

    kind: Literal["cheap", "dear", "product"]
    """`cheap`: elementwise work computes it again from the others. `product`: a matrix product. `dear`: neither; a
    small budget drops it first, because the partitioner counts no work for attention's outputs."""
    size: int
    """Bytes of storage that it keeps."""
    flops: float = 0.0
    """Operations to compute it again."""


@dataclass(frozen=True)
class BlockMemory:
    """Bytes of one block between its forward and its backward pass."""

    entry: int
    """Its input; full recomputation keeps only this."""
    saved: int
    """Saved by autograd without compilation and recomputation; casts of weights do not count."""
    selected: int
    """Kept by selective recomputation: the input, and the outputs of products and attention."""
    values: tuple[Value, ...]
    """In a compiled block, the partitioner chooses among these (`trainer.parallel.partition`)."""
    casts: tuple[int, int]
    """Casts of weights by the block: those that share a matrix with others, and separate ones."""
    freed: int
    """The difference between these weights and their smaller casts."""
    gradients: int
    """Gradients of its values that exist at the same time in its backward pass."""


@dataclass(frozen=True)
class OuterMemory:
    """Bytes outside of the blocks."""

    kept: int
    """Kept at the end of the forward pass for embedding, final norm, rotary tables and masks."""
    loss: int
    """Added by the head and its loss: a chunk of logits, and the head's gradient while it is summed."""
    head_gradient: int
    """The part of `loss` that stays until the head's gradient is reduced or stored."""
