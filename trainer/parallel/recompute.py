"""Activation checkpointing: what a block's forward keeps for its backward pass, and what is computed again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch._higher_order_ops.flex_attention import flex_attention
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from trainer.models.decoder import Decoder

aten = torch.ops.aten
KEPT_OPS: frozenset[Any] = frozenset(
    packet.default
    for packet in (
        aten.mm,
        aten.addmm,
        aten.bmm,
        aten.baddbmm,
        aten._scaled_mm,  # products in float8
        aten.max,  # the largest value of a tensor, by which it is scaled for them
        aten._scaled_dot_product_flash_attention,
        aten._scaled_dot_product_efficient_attention,
        aten._scaled_dot_product_cudnn_attention,
        aten._scaled_dot_product_flash_attention_for_cpu,
        aten._scaled_dot_product_fused_attention_overrideable,
        aten._flash_attention_forward,
        aten._efficient_attention_forward,
    )
) | {flex_attention}
"""Matrix products and attention: dear to compute; the rest of a block is cheap and large."""


def recompute_blocks(decoder: Decoder, mode: str, every: int) -> None:
    """Make every n-th block, the first included, keep less: `mode` none or budget, selective (KEPT_OPS) or full (its
    inputs).

    The recomputation is inside what FSDP wraps, so it sees the same gathered, cast parameters.
    """
    if mode in ("none", "budget"):  # a budget is the compiler's business
        return
    options: dict[str, Any] = {}
    if mode == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _keep)
    for block in list(decoder.model.layers)[::every]:
        block.forward = _recomputed(block.forward, options)


def _recomputed(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    def wrapped(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args)
        return checkpoint(forward, *args, use_reentrant=False, **options)

    return wrapped


def _keep(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in KEPT_OPS else CheckpointPolicy.PREFER_RECOMPUTE
