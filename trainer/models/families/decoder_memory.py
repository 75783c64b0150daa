"""Bytes that a Decoder keeps between the forward and the backward pass of one micro-batch, counted from its shapes.

The model is on the meta device: its shapes, its trained parameters and its adapters decide. This module follows
`families.decoder` tensor by tensor: a change of a block's computation needs a change here. Tests compare it with the
tensors that torch really saves and that the compiler's partitioner really keeps.

Legend: n tokens of a micro-batch, c bytes of a product's dtype, D hidden, Q and K query and key-value widths,
I intermediate, H heads, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from torch import nn

from trainer.models.attention import FLEX_HEAD_DIMS
from trainer.models.figures import FP32, BlockMemory, Micro, OuterMemory, Value
from trainer.models.layers import Linear
from trainer.models.losses import CHUNK_TOKENS, CHUNK_TOKENS_IN_TORCH

if TYPE_CHECKING:
    from trainer.models.families.decoder import Block, Decoder
    from trainer.models.families.decoder_shape import DecoderShape
    from trainer.models.lora import LoraSpec


def block_memory(block: Block, shape: DecoderShape, lora: LoraSpec | None, micro: Micro) -> BlockMemory:
    """Bytes that one block keeps for the backward pass."""
    fused = not micro.gathered and _is_fused(block, micro.c)
    casts = (0, 0) if micro.gathered else _cast_sizes(block, micro.c)
    return BlockMemory(
        entry=micro.n * micro.c * shape.hidden_size,
        saved=_saved(block, shape, lora, micro),
        selected=_selected(shape, micro),
        values=tuple(_values(block, shape, lora, micro, fused=fused)),
        casts=casts,
        freed=(FP32 - micro.c) * sum(casts) // micro.c,
        gradients=3 * micro.n * micro.c * shape.intermediate_size,
    )


def outer_memory(decoder: Decoder, micro: Micro) -> OuterMemory:
    """Bytes that the embedding, the final norm, the rotary tables, the mask and the head keep."""
    shape, norm = decoder.shape, decoder.model.norm.weight
    entry = micro.n * micro.c * shape.hidden_size
    rotary = FP32 * micro.n * shape.head_dim
    mask = micro.n * micro.seq_len if _is_dense(shape, micro) else 0
    final = _norm(micro, 1, shape.hidden_size, trains=norm.requires_grad and not micro.compiled)
    return OuterMemory(final + 2 * entry + rotary + mask, *_head(decoder, micro))


def _is_dense(shape: DecoderShape, micro: Micro) -> bool:
    """Whether packed rows use a dense mask."""
    return micro.packed and not (micro.triton and shape.head_dim in FLEX_HEAD_DIMS)


def _head(decoder: Decoder, micro: Micro) -> tuple[int, int]:
    """Bytes that the loss adds, and bytes of it that stay: the head's gradient, summed in fp32, kept in the weight's
    dtype."""
    weight, vocab = decoder.head_weight, decoder.shape.vocab_size
    chunk, width = (CHUNK_TOKENS, micro.c) if micro.triton else (CHUNK_TOKENS_IN_TORCH, micro.c + FP32)
    logits = min(chunk, micro.n) * vocab * width
    cast = 0 if micro.gathered or weight.element_size() == micro.c else micro.c * weight.numel()
    if not weight.requires_grad:
        return logits + cast, 0
    stays = (micro.c if micro.gathered else weight.element_size()) * weight.numel()
    return FP32 * weight.numel() + max(logits, stays if stays < FP32 * weight.numel() else 0) + cast, stays


# --- a block as autograd runs it --------------------------------------------------------------------------------------


def _saved(block: Block, shape: DecoderShape, lora: LoraSpec | None, micro: Micro) -> int:
    """Two norms, the tensors from queries to attention output, the MLP's products, and the adapters."""
    n, c = micro.n, micro.c
    attention, mlp = block.self_attn, block.mlp
    inputs = n * c * shape.hidden_size
    size = 0
    for norm, readers in (
        (block.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
        (block.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
    ):
        size += _norm(micro, 1, shape.hidden_size, trains=norm.weight.requires_grad)
        size += inputs * any(_keeps_input(linear) for linear in readers)
    product = n * c * shape.intermediate_size
    size += 3 * product + product * _keeps_input(mlp.down_proj)
    size += _attention(block, shape, micro)
    return size + sum(_adapter(linear, lora, micro) for linear in _linears_of(block))


def _attention(block: Block, shape: DecoderShape, micro: Micro) -> int:
    n, c, heads = micro.n, micro.c, shape.num_heads
    query, kv = _widths(shape)
    size = 0
    if shape.qk_norm:
        trains = block.self_attn.q_norm.weight.requires_grad
        size += _norm(micro, heads, query, trains=trains) + _norm(micro, shape.num_kv_heads, kv, trains=trains)
    # with a mask the key-value heads are repeated, and the mask itself is kept as a bias of the scores
    dense = _is_dense(shape, micro)
    keys = 2 * n * c * (query if dense else kv)
    bias = n * c * micro.seq_len if dense else 0
    return size + 2 * n * c * query + keys + FP32 * n * heads + bias


def _selected(shape: DecoderShape, micro: Micro) -> int:
    """A block's input and the outputs of its products and its attention."""
    query, kv = _widths(shape)
    products = 2 * query + 2 * kv + 3 * shape.hidden_size + 2 * shape.intermediate_size
    return micro.n * micro.c * products + FP32 * micro.n * shape.num_heads


def _norm(micro: Micro, groups: int, width: int, *, trains: bool) -> int:
    """One RMSNorm over `groups`, of `width` values together: fp32 input, one statistic per group, normed values."""
    return micro.n * (FP32 * width + FP32 * groups + (micro.c * width if trains else 0))


def _adapter(linear: Linear, spec: LoraSpec | None, micro: Micro) -> int:
    """The product with A, and with dropout the input after dropout and its mask."""
    if linear.adapter is None or spec is None:
        return 0
    dropped = micro.n * (micro.c + 1) * linear.in_features if spec.dropout else 0
    return micro.n * micro.c * spec.rank + dropped


# --- a compiled block -------------------------------------------------------------------------------------------------


def _values(block: Block, shape: DecoderShape, lora: LoraSpec | None, micro: Micro, *, fused: bool) -> Iterator[Value]:
    """The values that the block computes, as the partitioner counts them."""
    n, c, attention, mlp = micro.n, micro.c, block.self_attn, block.mlp
    wide, inner = shape.hidden_size, shape.intermediate_size
    query, kv = _widths(shape)
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    flops = 2.0 * n * wide
    for readers in (projections, (mlp.gate_proj, mlp.up_proj)):
        yield Value("cheap", n * c * wide * any(map(_keeps_input, readers)))  # the normed input
    turned = n * c * (query + kv)
    if fused:  # attention's values are a view of the one product, and keep all of it
        yield Value("product", n * c * (query + 2 * kv), flops * (query + 2 * kv))
    elif shape.qk_norm:
        yield from (Value("product", n * c * width, flops * width) for width in (query, kv, kv))
    else:  # queries and keys are kept after the rotation
        yield Value("product", n * c * kv, flops * kv)
    if fused or shape.qk_norm:
        yield Value("dear", turned)
    else:
        yield from (Value("product", n * c * width, flops * width) for width in (query, kv))
    yield Value("dear", n * (c * query + FP32 * shape.num_heads))  # attention's output and its log-sum-exp
    yield Value("cheap", n * c * query * _keeps_input(attention.o_proj))  # the output again, heads side by side
    yield Value("product", n * c * wide, 2.0 * n * query * wide)
    yield from (Value("product", n * c * inner, flops * inner) for _ in range(2))
    yield Value("cheap", n * c * inner * _keeps_input(mlp.down_proj))
    rank = 0 if lora is None else lora.rank
    yield Value("product", n * c * rank * sum(linear.adapter is not None for linear in _linears_of(block)))


def _is_fused(block: Block, c: int) -> bool:
    """Whether queries, keys and values are one product (`trainer.models.layers.products`): if all weights are cast."""
    attention = block.self_attn
    return all(x.weight.element_size() != c for x in (attention.q_proj, attention.k_proj, attention.v_proj))


def _cast_sizes(block: Block, c: int) -> tuple[int, int]:
    """Bytes of the casts of the weights: those in a shared matrix, and separate ones."""
    attention, mlp = block.self_attn, block.mlp
    together = (attention.q_proj, attention.k_proj, attention.v_proj)
    return _cast_size(together, c), _cast_size((attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj), c)


def _cast_size(modules: Sequence[nn.Module], c: int) -> int:
    return c * sum(p.numel() for module in modules for p in module.parameters() if p.element_size() != c)


def _keeps_input(linear: Linear) -> bool:
    """Whether the backward pass of a product reads its input."""
    return linear.weight.requires_grad or linear.adapter is not None


def _linears_of(block: Block) -> list[Linear]:
    """All linear layers of a block."""
    attention, mlp = block.self_attn, block.mlp
    return [
        *(attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj),
        *(mlp.gate_proj, mlp.up_proj, mlp.down_proj),
    ]


def _widths(shape: DecoderShape) -> tuple[int, int]:
    return shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
