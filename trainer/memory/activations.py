"""Bytes that autograd keeps between the forward and the backward pass of one micro-batch, counted from the model.

The model is on the meta device: its shapes, what of it trains, and its adapters decide. It follows `Decoder` tensor by
tensor, so whoever changes what a block computes changes this too; a test compares it with what torch really saves.
What a compiled block keeps is the partitioner's choice (`trainer.parallel.partition`).

Legend: n tokens of a micro-batch, c bytes of a product's dtype, D hidden, Q and K query and key-value widths,
I intermediate, H heads, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trainer.config.batch import BatchRules
from trainer.config.parallel import is_compiled, recompute_mode
from trainer.kernels.support import why_no_triton
from trainer.models.attention import FLEX_HEAD_DIMS
from trainer.models.decoder import Block, Decoder, DecoderShape, Linear
from trainer.models.lora import LoraSpec
from trainer.models.losses import CHUNK_TOKENS, CHUNK_TOKENS_IN_TORCH
from trainer.parallel.blocks import decide_compile
from trainer.parallel.partition import FP32, Kept, keeps_input, kept_by, linears_of
from trainer.schema import Config, ParallelConfig
from trainer.tensors import DTYPES


@dataclass(frozen=True)
class Kernels:
    """What runs on the device, as far as bytes go."""

    triton: bool
    """Packed attention without a dense mask, and a loss without logits in fp32."""
    compiled: bool

    @classmethod
    def assumed(cls, config: Config) -> Kernels:
        """Of the machine that the config is for, which may be another one: a GPU has Triton."""
        return cls(config.target.device != "cpu", is_compiled(config))

    @classmethod
    def on(cls, device: torch.device, options: ParallelConfig) -> Kernels:
        """Of a device that is here."""
        reason = why_no_triton(device)
        return cls(reason is None, decide_compile(options.compile, device, why_not=reason)[0])


@dataclass(frozen=True)
class Micro:
    """A micro-batch as far as bytes go."""

    n: int
    seq_len: int
    packed: bool
    """With a dense mask."""
    c: int

    @classmethod
    def of(cls, config: Config, *, dense: bool) -> Micro:
        rules = BatchRules.of(config)
        return cls(rules.tokens, rules.seq_len, rules.packing and dense, DTYPES[config.train.precision].itemsize)


@dataclass(frozen=True)
class Activations:
    """Bytes of one micro-batch. `kept` and `casts` are there when the forward pass ends."""

    kept: int
    casts: int
    """Of the blocks' weights, where no FSDP gathers them cast."""
    backward: int
    """What the last block's backward pass adds: what it computes again, and gradients of what it computed."""
    loss: int
    """What the head and its loss add before it: a chunk of logits, and the head's gradient while it is summed."""
    head_gradient: int
    """What stays of that until the head's gradient is reduced or stored."""


def count_activations(decoder: Decoder, config: Config, kernels: Kernels, *, gathered: bool) -> Activations:
    """The activations of a micro-batch. `gathered`: by FSDP, which casts the weights then."""
    shape = decoder.shape
    micro = Micro.of(config, dense=not (kernels.triton and shape.head_dim in FLEX_HEAD_DIMS))
    entry = micro.n * micro.c * shape.hidden_size
    rotary = FP32 * micro.n * shape.head_dim
    mask = micro.n * micro.seq_len if micro.packed else 0
    batch = 5 * 8 * micro.n
    final = _norm(micro, 1, shape.hidden_size, trains=decoder.model.norm.weight.requires_grad and not kernels.compiled)
    kept, casts, backward = _all_blocks(decoder, config, micro, kernels, gathered=gathered)
    kept += final + 2 * entry + rotary + mask + batch
    return Activations(kept, casts, backward, *_head(decoder, micro, kernels, gathered=gathered))


def _all_blocks(
    decoder: Decoder, config: Config, micro: Micro, kernels: Kernels, *, gathered: bool
) -> tuple[int, int, int]:
    """Kept, casts kept, and what the backward pass of the dearest block adds."""
    first, every = _first_trained(decoder), config.parallel.checkpoint_every
    gradients = 3 * micro.n * micro.c * decoder.shape.intermediate_size
    kept = casts = backward = 0
    for number, block in enumerate(decoder.blocks):
        if number < first:
            continue
        mode = recompute_mode(config.parallel)
        mode = "none" if mode in ("selective", "full") and number % every else mode
        count = _compiled_block if kernels.compiled else _eager_block
        one = count(block, decoder, config, micro, mode=mode, casts=not gathered)
        kept, casts = kept + one.values, casts + one.casts
        backward = max(backward, one.whole - one.values - one.casts + gradients)
    return kept, casts, backward


def _compiled_block(block: Block, decoder: Decoder, config: Config, micro: Micro, *, mode: str, casts: bool) -> Kept:
    """Its input, and what the partitioner keeps; selective checkpointing tells that what to keep."""
    budget = {"budget": config.parallel.activation_budget, "full": 0.0}.get(mode, 1.0)
    found = kept_by(block, decoder, n=micro.n, c=micro.c, budget=budget, casts=casts)
    entry = micro.n * micro.c * decoder.shape.hidden_size
    if mode == "selective":
        return Kept(_selected(decoder, micro) - entry, 0, entry + found.whole)
    return Kept(entry + found.values, found.casts, entry + found.whole)


def _eager_block(block: Block, decoder: Decoder, config: Config, micro: Micro, *, mode: str, casts: bool) -> Kept:
    values = _block(block, decoder, micro)
    cast = micro.c * sum(p.numel() for p in block.parameters() if p.element_size() != micro.c) if casts else 0
    if mode == "none":
        return Kept(values, cast, values + cast)
    entry = micro.n * micro.c * decoder.shape.hidden_size
    return Kept(_selected(decoder, micro) if mode == "selective" else entry, 0, values + cast)


def _first_trained(decoder: Decoder) -> int:
    """The first block whose output depends on something that trains: what comes before needs no backward pass."""
    if decoder.model.embed_tokens.weight.requires_grad:
        return 0
    trains = [any(p.requires_grad for p in block.parameters()) for block in decoder.blocks]
    return trains.index(True) if True in trains else len(trains)


def _block(block: Block, decoder: Decoder, micro: Micro) -> int:
    """Two norms, queries to attention output, and the MLP's products; adapters beside them."""
    shape, n, c = decoder.shape, micro.n, micro.c
    attention, mlp = block.self_attn, block.mlp
    inputs = n * c * shape.hidden_size
    size = 0
    for norm, readers in (
        (block.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
        (block.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
    ):
        size += _norm(micro, 1, shape.hidden_size, trains=norm.weight.requires_grad)
        size += inputs * any(keeps_input(linear) for linear in readers)
    product = n * c * shape.intermediate_size
    size += 3 * product + product * keeps_input(mlp.down_proj)
    size += _attention(block, shape, micro)
    return size + sum(_adapter(linear, decoder.lora, micro) for linear in linears_of(block))


def _attention(block: Block, shape: DecoderShape, micro: Micro) -> int:
    n, c, heads = micro.n, micro.c, shape.num_heads
    query, kv = _widths(shape)
    size = 0
    if shape.qk_norm:
        trains = block.self_attn.q_norm.weight.requires_grad
        size += _norm(micro, heads, query, trains=trains) + _norm(micro, shape.num_kv_heads, kv, trains=trains)
    # with a mask the key-value heads are repeated, and the mask itself is kept as a bias of the scores
    keys = 2 * n * c * (query if micro.packed else kv)
    bias = n * c * micro.seq_len if micro.packed else 0
    return size + 2 * n * c * query + keys + FP32 * n * heads + bias


def _selected(decoder: Decoder, micro: Micro) -> int:
    """A block's input and the outputs of its products and its attention."""
    shape, n, c = decoder.shape, micro.n, micro.c
    query, kv = _widths(shape)
    products = 2 * query + 2 * kv + 3 * shape.hidden_size + 2 * shape.intermediate_size
    return n * c * products + FP32 * n * shape.num_heads


def _norm(micro: Micro, groups: int, width: int, *, trains: bool) -> int:
    """One RMSNorm over `groups` of a width: its fp32 input, one statistic each, and the normed values."""
    return micro.n * (FP32 * width + FP32 * groups + (micro.c * width if trains else 0))


def _adapter(linear: Linear, spec: LoraSpec | None, micro: Micro) -> int:
    """The narrow product, and with dropout the dropped input with its mask."""
    if linear.adapter is None or spec is None:
        return 0
    dropped = micro.n * (micro.c + 1) * linear.in_features if spec.dropout else 0
    return micro.n * micro.c * spec.rank + dropped


def _widths(shape: DecoderShape) -> tuple[int, int]:
    return shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim


def _head(decoder: Decoder, micro: Micro, kernels: Kernels, *, gathered: bool) -> tuple[int, int]:
    """What the loss adds, and what of it stays: the head's gradient, summed in fp32 and kept in the weight's dtype."""
    weight, vocab = decoder.head_weight, decoder.shape.vocab_size
    chunk, width = (CHUNK_TOKENS, micro.c) if kernels.triton else (CHUNK_TOKENS_IN_TORCH, micro.c + FP32)
    logits = min(chunk, micro.n) * vocab * width
    cast = 0 if gathered or weight.element_size() == micro.c else micro.c * weight.numel()
    if not weight.requires_grad:
        return logits + cast, 0
    stays = (micro.c if gathered else weight.element_size()) * weight.numel()
    return FP32 * weight.numel() + max(logits, stays if stays < FP32 * weight.numel() else 0) + cast, stays
