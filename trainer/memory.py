"""How many bytes a run takes on each rank, told before it starts, and what would lower them.

Parameters, gradients and optimizer state are exact. Activations are what autograd saves for the backward pass of one
micro-batch, counted from the shapes. Together they are what torch's allocator hands out at its peak, without CUDA's own
context (about 0.5 GiB) and what the allocator leaves unused between blocks (5 to 10 %).

Legend: n tokens of a micro-batch, c bytes of a product's dtype, D hidden, Q and K query and key-value widths,
I intermediate, H heads, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import torch
from torch import nn

from trainer.config_parallel import backend_of, sharding
from trainer.losses import CHUNK_TOKENS
from trainer.models.decoder import Decoder, DecoderShape
from trainer.schema import Config

GIB = 2**30
FP32 = 4
BYTES = {"bf16": 2, "fp32": 4}
ADAM_STATES = 2
IN_FLIGHT_BLOCKS = 2
"""Block groups that FSDP holds gathered at a time: the one in use and the one fetched ahead."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on the rank that holds most, at the peak of a step."""

    parameters: int
    """As stored: the rank's shard under FSDP."""
    gradients: int
    """As the optimizer reads them; with accumulation under FSDP also the unsharded ones that wait for the last
    micro-batch."""
    optimizer: int
    gathered: int
    """Parameters in the dtype of the products: what FSDP gathers, or the casts that autograd keeps."""
    activations: int
    """What is saved for the backward pass of one micro-batch."""
    logits: int
    """One chunk of logits with its gradient, and the gradient of the head."""
    communication: int
    """Buffers of collectives."""

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def static(self) -> int:
        """What stays from step to step, whatever the batch."""
        return self.parameters + self.gradients + self.optimizer

    def render(self) -> list[str]:
        """A table of a few lines, in GiB."""
        rows = [(field.name, getattr(self, field.name)) for field in fields(self)]
        return [f"  {name:<14}{render_bytes(size):>12}" for name, size in [*rows, ("total", self.total)]]


def render_bytes(size: int) -> str:
    """`12.34 GiB`, or in MiB below a tenth of one."""
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:.2f} MiB"


def estimate_memory(
    shape: DecoderShape, config: Config, *, world_size: int, trainable_params: int | None = None
) -> MemoryEstimate:
    """What each of `world_size` ranks takes at its peak; `trainable_params` (None: all) have gradients and state."""
    weights = _Weights.of(shape, share=shard_ranks(config, world_size))
    part = 1.0 if trainable_params is None else trainable_params / weights.total
    activations = _activations(shape, config)
    logits = _logits(shape, config)
    sharded, compute = _is_sharded(config, world_size), BYTES[config.train.precision]
    gradients = FP32 * weights.local
    if sharded and micro_batches(config, world_size) > 1:
        gradients += FP32 * weights.total
    buffers = 0
    if sharded:
        reduce = BYTES[config.parallel.reduce_dtype]
        in_block = (compute + reduce) * weights.block
        in_root = (compute + reduce) * weights.root - activations - logits  # these are gone when the root is reduced
        buffers = max(in_block, in_root)
    return MemoryEstimate(
        parameters=FP32 * weights.local,
        gradients=round(part * gradients),
        optimizer=round(part * ADAM_STATES * FP32 * weights.local),
        gathered=_gathered(weights, config, sharded=sharded),
        activations=activations,
        logits=logits,
        communication=round(part * buffers),
    )


@dataclass(frozen=True)
class _Weights:
    """Numbers of parameters: of the model, of the fullest rank's share, of the root group, of one block, of the head;
    `blocks` of all blocks together."""

    total: int
    local: int
    root: int
    block: int
    blocks: int
    head: int

    @classmethod
    def of(cls, shape: DecoderShape, *, share: int) -> _Weights:
        with torch.device("meta"):
            decoder = Decoder(shape)
        total, block = _count(decoder), _count(decoder.blocks[0])
        blocks = block * len(decoder.blocks)
        # FSDP cuts the first axis into equal parts, rounded up
        local = sum(-(-p.shape[0] // share) * p[0].numel() for p in decoder.parameters())
        return cls(total, local, total - blocks, block, blocks, decoder.head_weight.numel())


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _is_sharded(config: Config, world_size: int) -> bool:
    return backend_of(config, world_size) == "fsdp"


def shard_ranks(config: Config, world_size: int) -> int:
    """Ranks that share one copy of the model."""
    replicas = config.parallel.dp_replicate if sharding(config.parallel).hybrid else 1
    return world_size // (replicas or 1) if _is_sharded(config, world_size) else 1


def _recomputed_blocks(shape: DecoderShape, config: Config) -> int:
    """Blocks under activation checkpointing."""
    if config.parallel.activation_checkpointing == "none":
        return 0
    return -(-shape.num_layers // config.parallel.checkpoint_every)


def micro_batches(config: Config, world_size: int) -> int:
    """Forwards of each rank in an optimizer step."""
    train = config.train
    if train.grad_accum_steps is not None:
        return train.grad_accum_steps
    if train.global_batch_size is None:
        return 1
    return -(-train.global_batch_size // (world_size * train.micro_batch_size))


def _gathered(weights: _Weights, config: Config, *, sharded: bool) -> int:
    compute, recompute = BYTES[config.train.precision], config.parallel.activation_checkpointing == "full"
    if sharded:
        keep = sharding(config.parallel).reshard is False
        blocks = weights.blocks if keep else min(IN_FLIGHT_BLOCKS * weights.block, weights.blocks)
        return compute * (weights.root + blocks)
    if compute == FP32:
        return 0
    return compute * (weights.head + (weights.block if recompute else weights.blocks))


# --- what autograd keeps ----------------------------------------------------------------------------------------------


def _tokens(config: Config) -> int:
    return config.train.micro_batch_size * config.data.seq_len


def _activations(shape: DecoderShape, config: Config) -> int:
    """Saved for the backward pass of one micro-batch; with recomputation, one block is whole at a time."""
    n, c = _tokens(config), BYTES[config.train.precision]
    block, entry = _block_activations(shape, config), n * c * shape.hidden_size
    recomputed = _recomputed_blocks(shape, config)
    kept = entry + (_products(shape, n, c) if config.parallel.activation_checkpointing == "selective" else 0)
    blocks = recomputed * kept + (shape.num_layers - recomputed) * block + (block if recomputed else 0)
    rotary = 2 * FP32 * n * shape.head_dim
    mask = n * config.data.seq_len if config.data.packing else 0
    batch = 4 * 8 * n
    return blocks + _norm(n, c, 1, shape.hidden_size) + 2 * entry + rotary + mask + batch


def _block_activations(shape: DecoderShape, config: Config) -> int:
    """What a block saves: two norms and what they give, queries to attention output, and the MLP's products."""
    n, c, heads = _tokens(config), BYTES[config.train.precision], shape.num_heads
    query, kv = heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    norms = 2 * (_norm(n, c, 1, shape.hidden_size) + n * c * shape.hidden_size)
    if shape.qk_norm:
        norms += _norm(n, c, heads, query) + _norm(n, c, shape.num_kv_heads, kv)
    # with a mask the key-value heads are repeated, and the mask itself is kept as a bias of the scores
    keys = 2 * n * c * (query if config.data.packing else kv)
    bias = n * c * config.data.seq_len if config.data.packing else 0
    attention = 2 * n * c * query + keys + FP32 * n * heads + bias
    return norms + attention + 4 * n * c * shape.intermediate_size


def _products(shape: DecoderShape, n: int, c: int) -> int:
    """What selective checkpointing keeps of a block: the outputs of its products and of attention."""
    query, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    attention = n * c * query + FP32 * n * shape.num_heads
    return n * c * (query + 2 * kv + 2 * shape.hidden_size + 2 * shape.intermediate_size) + attention


def _norm(n: int, c: int, groups: int, width: int) -> int:
    """One RMSNorm over `groups` of a width: its fp32 input, one statistic each, and the normed values."""
    return n * (FP32 * width + FP32 * groups + c * width)


def _logits(shape: DecoderShape, config: Config) -> int:
    """A chunk's logits, their fp32 log-probabilities and gradient, and the head's gradient, summed in fp32."""
    c, chunk = BYTES[config.train.precision], min(CHUNK_TOKENS, _tokens(config))
    cast = 0 if c == FP32 else c
    return chunk * shape.vocab_size * (c + FP32 + cast) + shape.vocab_size * shape.hidden_size * (FP32 + c)


# --- what would lower it ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Saving:
    """One change of the config and the bytes per rank that it saves."""

    change: str
    """As an override: `train.micro_batch_size=2`."""
    size: int
    note: str = ""
    """What it costs, or what goes with it."""

    def render(self) -> str:
        """`train.micro_batch_size=2 saves 1.25 GiB`, with the note."""
        return f"{self.change} saves {render_bytes(self.size)}" + (f" ({self.note})" if self.note else "")


def savings(
    shape: DecoderShape, config: Config, *, world_size: int, trainable_params: int | None = None
) -> list[Saving]:
    """Single changes that lower the estimate, the most helpful first; none that is in use already."""
    now = estimate_memory(shape, config, world_size=world_size, trainable_params=trainable_params).total
    found = []
    for change, changed, ranks, note in _changes(config, world_size):
        then = estimate_memory(shape, changed, world_size=ranks, trainable_params=trainable_params).total
        found.append(Saving(change, now - then, note))
    return sorted((saving for saving in found if saving.size > 0), key=lambda saving: -saving.size)


def _changes(config: Config, world_size: int) -> Iterator[tuple[str, Config, int, str]]:
    """Each change as an override, the config with it, the ranks then, and a note."""
    train, data, target = config.train, config.data, config.target
    if train.micro_batch_size > 1:
        rows = train.micro_batch_size // 2
        note = f"train.global_batch_size={global_batch(config, world_size)} keeps the batch"
        smaller = replace(train, micro_batch_size=rows, grad_accum_steps=None)
        smaller = replace(smaller, global_batch_size=global_batch(config, world_size))
        yield f"train.micro_batch_size={rows}", replace(config, train=smaller), world_size, note
    if data.seq_len > 2:
        shorter = replace(config, data=replace(data, seq_len=data.seq_len // 2))
        yield f"data.seq_len={data.seq_len // 2}", shorter, world_size, "longer rows are cut"
    if config.parallel.activation_checkpointing == "none":
        parallel = replace(config.parallel, activation_checkpointing="full")
        note = "about a third more time"
        yield "parallel.activation_checkpointing=full", replace(config, parallel=parallel), world_size, note
    ranks = 2 * world_size
    spread = replace(target, train_backend="fsdp")
    yield "target.train_backend=fsdp", replace(config, target=spread), ranks, f"over {ranks} GPUs"


def global_batch(config: Config, world_size: int) -> int:
    """Rows of an optimizer step over all ranks."""
    train = config.train
    return train.global_batch_size or world_size * train.micro_batch_size * micro_batches(config, world_size)
