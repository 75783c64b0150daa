"""Bytes that autograd keeps between the forward and the backward pass of one micro-batch, counted from the model.

The model is on the meta device: its shapes, what of it trains, and its adapters decide. It follows `Decoder` tensor by
tensor, so whoever changes what a block computes changes this too; a test compares it with what torch really saves.

Legend: n tokens of a micro-batch, c bytes of a product's dtype, D hidden, Q and K query and key-value widths,
I intermediate, H heads, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainer.losses import CHUNK_TOKENS
from trainer.models.decoder import Block, Decoder, DecoderShape, Linear
from trainer.models.lora import LoraSpec
from trainer.parallel.tensors import DTYPES
from trainer.schema import Config

FP32 = 4


@dataclass(frozen=True)
class Micro:
    """A micro-batch as far as bytes go."""

    n: int
    seq_len: int
    packed: bool
    c: int

    @classmethod
    def of(cls, config: Config) -> Micro:
        train, data = config.train, config.data
        n = train.micro_batch_tokens or train.micro_batch_size * data.seq_len
        return cls(n, data.seq_len, data.packing, DTYPES[train.precision].itemsize)


def activation_bytes(decoder: Decoder, config: Config) -> int:
    """All that is kept at the end of the forward pass, and the block that is computed again where that is asked for."""
    micro, hidden = Micro.of(config), decoder.shape.hidden_size
    entry = micro.n * micro.c * hidden
    rotary = 2 * FP32 * micro.n * decoder.shape.head_dim
    mask = micro.n * micro.seq_len if micro.packed else 0
    batch = 4 * 8 * micro.n
    final_norm = _norm(micro, 1, hidden, trains=decoder.model.norm.weight.requires_grad)
    return _all_blocks(decoder, config, micro) + final_norm + 2 * entry + rotary + mask + batch


def _all_blocks(decoder: Decoder, config: Config, micro: Micro) -> int:
    mode, every = config.parallel.activation_checkpointing, config.parallel.checkpoint_every
    whole = [_block(block, decoder, micro) for block in decoder.blocks]
    again = [mode != "none" and number % every == 0 for number in range(len(whole))]
    light = _selected(decoder, micro) if mode == "selective" else micro.n * micro.c * decoder.shape.hidden_size
    first = _first_trained(decoder)
    kept = [light if redo else size for size, redo in zip(whole, again, strict=True)]
    return sum(kept[first:]) + max((whole[first:]), default=0) * any(again[first:])


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
        size += inputs * any(_keeps_input(linear) for linear in readers)
    product = n * c * shape.intermediate_size
    size += 3 * product + product * _keeps_input(mlp.down_proj)
    size += _attention(block, shape, micro)
    return size + sum(_adapter(linear, decoder.lora, micro) for linear in _linears(block))


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


def _keeps_input(linear: Linear) -> bool:
    return linear.weight.requires_grad or linear.adapter is not None


def _linears(block: Block) -> list[Linear]:
    attention, mlp = block.self_attn, block.mlp
    return [
        *(attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj),
        *(mlp.gate_proj, mlp.up_proj, mlp.down_proj),
    ]


def _widths(shape: DecoderShape) -> tuple[int, int]:
    return shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim


def logits_bytes(decoder: Decoder, config: Config) -> int:
    """A chunk's logits, their fp32 log-probabilities and gradient, and the head's gradient, summed in fp32."""
    micro, vocab = Micro.of(config), decoder.shape.vocab_size
    cast = 0 if micro.c == FP32 else micro.c
    head = decoder.head_weight.numel() * (FP32 + micro.c) if decoder.head_weight.requires_grad else 0
    return min(CHUNK_TOKENS, micro.n) * vocab * (micro.c + FP32 + cast) + head
