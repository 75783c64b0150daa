"""What a model says of itself in numbers, for those who plan: operations of a token, bytes for the backward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainer.config.batch import BatchRules
from trainer.schema import Config
from trainer.tensors import DTYPES

FP32 = 4
"""Bytes of a value."""


@dataclass(frozen=True)
class Flops:
    """Floating point operations of training, forward and backward: products with weights, and attention within each
    document, without a discount for causality (the convention of the PaLM paper, appendix B)."""

    products: float
    """Of a token: 6 for each parameter that multiplies."""
    head: float
    """That part of them which only a token with a label needs: MFU counts it of every token, as is usual."""
    attention: float
    """Of a token and each token of its document: 12·L·H·Dh."""

    def per_token(self, mean_length: float) -> float:
        """`mean_length`: of the document that a token stands in, so sum of squared lengths / sum of lengths."""
        return self.products + self.attention * mean_length


NO_FLOPS = Flops(0.0, 0.0, 0.0)


# --- memory ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Micro:
    """A micro-batch, and what runs it, as far as bytes go."""

    n: int
    """Tokens."""
    seq_len: int
    packed: bool
    """Several documents in a row."""
    c: int
    """Bytes of a value in the dtype of products."""
    triton: bool
    """Packed attention without a dense mask, and a loss without logits in fp32."""
    compiled: bool
    gathered: bool
    """By FSDP, which casts the weights then; else a block casts those that are stored in another dtype."""

    @classmethod
    def of(cls, config: Config, *, triton: bool, compiled: bool, gathered: bool) -> Micro:
        """The micro-batch of a config."""
        rules, c = BatchRules.of(config), DTYPES[config.train.precision].itemsize
        return cls(rules.tokens, rules.seq_len, rules.packing, c, triton, compiled, gathered)


@dataclass(frozen=True)
class Value:
    """What a block computes and its backward pass reads."""

    kind: Literal["cheap", "dear", "product"]
    """`cheap`: made again from the others by elementwise work. `product`: a matrix product. `dear`: neither, and what
    a small budget drops first: the partitioner counts no work for attention's outputs."""
    size: int
    """Bytes of storage that it keeps."""
    flops: float = 0.0
    """To make it again."""


@dataclass(frozen=True)
class BlockMemory:
    """Bytes of one block between its forward and its backward pass."""

    entry: int
    """Its input, which is all that full recomputation keeps."""
    saved: int
    """What autograd saves where nothing is compiled and nothing computed again, without casts of weights."""
    selected: int
    """With the input, the outputs of products and attention: what selective recomputation keeps."""
    values: tuple[Value, ...]
    """Among which the partitioner chooses where the block is compiled (`trainer.parallel.partition`)."""
    casts: tuple[int, int]
    """Of the weights that it casts itself: those that are written into one matrix with others, and those alone."""
    freed: int
    """By how much the casts are smaller than these weights."""
    gradients: int
    """Of its values, alive at once in its backward pass."""


@dataclass(frozen=True)
class OuterMemory:
    """Bytes outside of the blocks."""

    kept: int
    """From embedding, final norm, rotary tables and masks, when the forward pass ends."""
    loss: int
    """What the head and its loss add: a chunk of logits, and the head's gradient while it is summed."""
    head_gradient: int
    """What stays of that until the head's gradient is reduced or stored."""
