"""Estimates the bytes that a run takes on each rank before it starts, and the changes that would lower them.

Parameters, gradients and optimizer state are exact. Activations are the tensors that autograd saves for the backward
pass of one micro-batch, counted from the shapes. The sum is the peak of torch's allocated memory, without CUDA's
context (about 0.5 GiB) and the allocator's unused memory between blocks (5 to 10 %).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from trainer.config.parallel import backend_of, recompute_mode, sharding
from trainer.data.batches.steps import global_batch_size, micro_batches
from trainer.memory.activations import Kernels, count_activations
from trainer.models.build import build_model
from trainer.models.figures import FP32
from trainer.models.protocol import Shape
from trainer.parallel.plan import HEAD, ROOT, Group, WrapPlan
from trainer.parallel.wrapping import plan_wrapping
from trainer.schema import Config
from trainer.words import render_bytes

PARTS = ("parameters", "gradients", "optimizer", "gathered", "activations", "temporary", "communication")
"""The parts of an estimate, in the order of display; they do not all exist at the same time."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on the device at the peak of a step, of the rank that needs most."""

    parameters: int
    """As stored: the rank's shard under FSDP."""
    gradients: int
    """As the optimizer reads them. With accumulation under FSDP: the unsharded ones that wait for the last micro-batch;
    they are freed while the shards are created."""
    optimizer: int
    gathered: int
    """Parameters in the dtype of the products: gathered by FSDP, or casts that autograd keeps."""
    activations: int
    """Saved for the backward pass of one micro-batch."""
    temporary: int
    """In addition, the larger of two: the head's loss (a chunk of logits, the head's gradient), or the backward pass of
    one block (recomputed values, gradients of its values)."""
    communication: int
    """Buffers of collectives."""
    offloaded: int = 0
    """On the CPU instead: parameters, gradients and optimizer state with `parallel.cpu_offload`. In no sum."""
    accumulates: bool = False
    """Whether a step has several forwards, so that gradients and activations exist at the same time."""

    @property
    def total(self) -> int:
        """The peak in bytes. In a step of one forward, gradients are created while activations are freed: the larger of
        the two counts."""
        batch = self.activations + self.temporary
        moving = batch + self.gradients if self.accumulates else max(batch, self.gradients)
        return self.parameters + self.optimizer + self.gathered + self.communication + moving

    def render(self) -> list[str]:
        """A table of a few lines, in GiB."""
        rows = [(name, getattr(self, name)) for name in PARTS] + [("at the peak", self.total)]
        if self.offloaded:
            rows.append(("on the CPU", self.offloaded))
        return [f"  {name:<14}{render_bytes(size):>12}" for name, size in rows]


def estimate_memory(shape: Shape, config: Config, *, world_size: int, kernels: Kernels | None = None) -> MemoryEstimate:
    """The peak of each of `world_size` ranks, with the adapters and the frozen parameters of the config.

    `kernels`: those of the device; None: those that the config's machine is assumed to have.
    """
    model = build_model(config, shape)
    plan = plan_wrapping(model, config, world_size)
    gathers = plan.backend == "fsdp"
    batch = count_activations(model, config, kernels or Kernels.assumed(config), gathered=gathers)
    temporary = max(batch.loss, batch.head_gradient + batch.backward)
    accumulates = micro_batches(config, world_size) > 1
    waiting = plan.unsharded_grad_bytes if accumulates else 0
    stored = (plan.local_bytes, FP32 * plan.local_trainable, round(plan.state_bytes * plan.local_trainable))
    on_device = (0, 0, 0) if plan.offloaded else stored
    return MemoryEstimate(
        parameters=on_device[0],
        gradients=max(on_device[1], waiting),
        optimizer=on_device[2],
        gathered=plan.peak_gathered_bytes if gathers else batch.casts,
        activations=batch.kept,
        temporary=temporary,
        communication=_buffer_bytes(plan, kept=batch.kept, temporary=temporary),
        offloaded=sum(stored) if plan.offloaded else 0,
        accumulates=accumulates,
    )


def _buffer_bytes(plan: WrapPlan, *, kept: int, temporary: int) -> int:
    """The largest buffer of a group's gather and of its gradients' reduction, minus memory that is freed by then.

    The root and an embedding are reduced when the activations are freed. A separate head is gathered before the loss
    computes its logits, and reduced after it.
    """
    if plan.backend != "fsdp":
        return 0

    def size(group: Group) -> int:
        reduced = plan.reduce_bytes * group.trainable
        if group.name == HEAD:
            return max(group.gathered_bytes, reduced) - temporary
        late = group.name == ROOT or not group.needed_again
        return group.gathered_bytes + reduced - (kept + temporary if late else 0)

    return max(0, *map(size, plan.groups))


# --- changes that lower the estimate ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Saving:
    """One change of the config and the bytes per rank that it saves."""

    change: str
    """As an override: `train.micro_batch_size=2`."""
    size: int
    note: str = ""
    """Its cost, or a related change."""

    def render(self) -> str:
        """`train.micro_batch_size=2 saves 1.25 GiB`, with the note."""
        return f"{self.change} saves {render_bytes(self.size)}" + (f" ({self.note})" if self.note else "")


def savings(shape: Shape, config: Config, *, world_size: int) -> list[Saving]:
    """Single changes that lower the estimate, the largest saving first; without changes that the config already has."""
    now = estimate_memory(shape, config, world_size=world_size).total
    found = []
    for change, changed, ranks, note in _changes(config, world_size):
        then = estimate_memory(shape, changed, world_size=ranks).total
        found.append(Saving(change, now - then, note))
    return sorted((saving for saving in found if saving.size > 0), key=lambda saving: -saving.size)


def _changes(config: Config, world_size: int) -> Iterator[tuple[str, Config, int, str]]:
    """Each change as an override, the changed config, its number of ranks, and a note."""
    yield from _smaller_batches(config, world_size)
    parallel, optim = config.parallel, config.optim
    if recompute_mode(parallel) != "full":
        changed = replace(config, parallel=replace(parallel, activation_checkpointing="full"))
        yield "parallel.activation_checkpointing=full", changed, world_size, "about a third more time"
    if optim.optimizer == "adamw":
        changed = replace(config, optim=replace(optim, optimizer="adamw8bit"))
        yield "optim.optimizer=adamw8bit", changed, world_size, "needs torchao"
    if config.lora.rank is None and config.lora.adapter is None and not config.model.freeze:
        changed = replace(config, lora=replace(config.lora, rank=16))
        yield "lora.rank=16", changed, world_size, "trains adapters instead of the model"
    yield from _freed_copies(config, world_size)
    yield from _other_spreads(config, world_size)


def _smaller_batches(config: Config, world_size: int) -> Iterator[tuple[str, Config, int, str]]:
    train, data = config.train, config.data
    if train.micro_batch_tokens is None and train.micro_batch_size > 1:
        rows, batch = train.micro_batch_size // 2, global_batch_size(config, world_size)
        smaller = replace(train, micro_batch_size=rows, grad_accum_steps=None, global_batch_size=batch)
        note = f"train.global_batch_size={batch} keeps the batch"
        yield f"train.micro_batch_size={rows}", replace(config, train=smaller), world_size, note
    if train.micro_batch_tokens is not None and train.micro_batch_tokens >= 2 * data.seq_len:
        tokens = train.micro_batch_tokens // 2
        smaller = replace(train, micro_batch_tokens=tokens)
        yield f"train.micro_batch_tokens={tokens}", replace(config, train=smaller), world_size, ""
    elif data.seq_len > 2:
        shorter = replace(config, data=replace(data, seq_len=data.seq_len // 2))
        yield f"data.seq_len={data.seq_len // 2}", shorter, world_size, "longer rows are cut"


def _freed_copies(config: Config, world_size: int) -> Iterator[tuple[str, Config, int, str]]:
    parallel, how = config.parallel, sharding(config.parallel)
    if backend_of(config, world_size) != "fsdp" or how.reshard is not False:
        return
    if parallel.sharding_strategy is None:
        change, freeing = "reshard_after_forward=true", replace(parallel, reshard_after_forward=True)
    else:
        word: Literal["HYBRID_SHARD", "FULL_SHARD"] = "HYBRID_SHARD" if how.hybrid else "FULL_SHARD"
        change = f"sharding_strategy={word}"
        freeing = replace(parallel, sharding_strategy=word, reshard_after_forward=None)
    yield f"parallel.{change}", replace(config, parallel=freeing), world_size, "gathers again in the backward"


def _other_spreads(config: Config, world_size: int) -> Iterator[tuple[str, Config, int, str]]:
    """Changes that use more ranks, or the CPU's memory."""
    parallel, target = config.parallel, config.target
    sharded = target.train_backend == "fsdp" or (target.train_backend == "auto" and world_size > 1)
    if parallel.dp_replicate is None and parallel.sharding_strategy != "NO_SHARD":
        spread, ranks = replace(config, target=replace(target, train_backend="fsdp")), 2 * world_size
        if sharded:
            yield f"target.gpu_ranks=auto:{ranks}", spread, ranks, "or name as many GPUs"
        else:
            yield "target.train_backend=fsdp", spread, ranks, f"over {ranks} GPUs"
        if sharded and not parallel.cpu_offload:
            changed = replace(config, parallel=replace(parallel, cpu_offload=True))
            yield "parallel.cpu_offload=true", changed, world_size, "each step waits for the CPU"
