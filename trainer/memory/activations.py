"""Bytes that autograd keeps between the forward and the backward pass of one micro-batch, for any model.

The model gives the bytes that a block keeps (`Model.block_memory`). This module, and the compiler's partitioner
(`trainer.parallel.partition`), decide which of them are computed again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from trainer.config.parallel import is_compiled, recompute_mode
from trainer.kernels.support import why_no_triton
from trainer.models.figures import BlockMemory, Micro
from trainer.models.protocol import Model
from trainer.parallel.blocks import decide_compile
from trainer.parallel.partition import Kept, kept_by
from trainer.schema import Config, ParallelConfig


@dataclass(frozen=True)
class Kernels:
    """The properties of a device's kernels that decide bytes."""

    triton: bool
    """Whether packed attention needs no dense mask, and the loss no logits in fp32."""
    compiled: bool

    @classmethod
    def assumed(cls, config: Config) -> Kernels:
        """The kernels of the machine that the config is for, maybe not this one: assumes that a GPU has Triton."""
        return cls(config.target.device != "cpu", is_compiled(config))

    @classmethod
    def on(cls, device: torch.device, options: ParallelConfig) -> Kernels:
        """The kernels that a device of this machine can use."""
        reason = why_no_triton(device)
        return cls(reason is None, decide_compile(options.compile, device, why_not=reason)[0])


@dataclass(frozen=True)
class Activations:
    """Bytes of one micro-batch. `kept` and `casts` exist when the forward pass ends."""

    kept: int
    casts: int
    """Casts of the blocks' weights, if FSDP does not gather them already cast."""
    backward: int
    """Added by the last block's backward pass: recomputed values, and gradients of its values."""
    loss: int
    """Added before that by the head and its loss: a chunk of logits, and the head's gradient while it is summed."""
    head_gradient: int
    """The part of `loss` that stays until the head's gradient is reduced or stored."""


def count_activations(model: Model, config: Config, kernels: Kernels, *, gathered: bool) -> Activations:
    """The activations of a micro-batch. `gathered`: whether FSDP gathers the weights, which also casts them."""
    micro = Micro.of(config, triton=kernels.triton, compiled=kernels.compiled, gathered=gathered)
    outer = model.outer_memory(micro)
    batch = 5 * 8 * micro.n
    kept, casts, backward = _all_blocks(model, config, micro)
    return Activations(kept + outer.kept + batch, casts, backward, outer.loss, outer.head_gradient)


def _all_blocks(model: Model, config: Config, micro: Micro) -> tuple[int, int, int]:
    """Bytes kept, bytes of casts kept, and the bytes that the backward pass of the largest block adds."""
    first, every = _first_trained(model), config.parallel.checkpoint_every
    kept = casts = backward = 0
    for number, block in enumerate(model.blocks):
        if number < first:
            continue
        mode = recompute_mode(config.parallel)
        mode = "none" if mode in ("selective", "full") and number % every else mode
        said = model.block_memory(block, micro)
        one = _compiled(said, config, micro, mode) if micro.compiled else _eager(block, said, micro, mode)
        kept, casts = kept + one.values, casts + one.casts
        backward = max(backward, one.whole - one.values - one.casts + said.gradients)
    return kept, casts, backward


def _compiled(said: BlockMemory, config: Config, micro: Micro, mode: str) -> Kept:
    """Bytes of a compiled block: its input, and the values that the partitioner keeps. With selective checkpointing the
    kept values are fixed."""
    budget = {"budget": config.parallel.activation_budget, "full": 0.0}.get(mode, 1.0)
    found = kept_by(said, budget)
    if mode == "selective":
        return Kept(said.selected - said.entry, 0, said.entry + found.whole)
    return Kept(said.entry + found.values, found.casts, said.entry + found.whole)


def _eager(block: nn.Module, said: BlockMemory, micro: Micro, mode: str) -> Kept:
    cast = 0 if micro.gathered else micro.c * sum(p.numel() for p in block.parameters() if p.element_size() != micro.c)
    if mode == "none":
        return Kept(said.saved, cast, said.saved + cast)
    return Kept(said.selected if mode == "selective" else said.entry, 0, said.saved + cast)


def _first_trained(model: Model) -> int:
    """The first block whose output depends on a trained parameter: blocks before it need no backward pass."""
    owner = {id(p): number for number, block in enumerate(model.blocks) for p in block.parameters()}
    seen = False
    for parameter in model.parameters():  # in the order in which they run
        number = owner.get(id(parameter))
        seen = seen or number is not None
        if parameter.requires_grad:
            return number if number is not None else len(model.blocks) if seen else 0
    return len(model.blocks)
