"""How each block runs: compiled where that can be had, and what of its activations is computed again.

The forward alone is compiled, so FSDP's hooks stay outside of it and no parameter gets another name. All blocks are of
one kind and share what is compiled for the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from traceback import walk_tb
from typing import Any

import torch
from torch import nn
from torch._higher_order_ops.flex_attention import flex_attention
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from trainer.errors import ConfigError
from trainer.models.protocol import Model

VARIANTS = 64
"""Graphs of a block at most. Rows of any length, one or several, with and without gradients, of a frozen and a trained
input come to about 15; torch's own limit of 8 would end the run in the middle, for each graph must be whole."""
FAILURES = ("torch._dynamo.exc", "torch._inductor", "triton")
"""Modules whose exceptions say that something could not be compiled."""
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


def decide_compile(wanted: bool | None, device: torch.device, *, why_not: str | None) -> tuple[bool, str]:
    """Whether blocks are compiled, and why not where that was not asked for. `why_not`: why Triton cannot run there.

    None: wherever Triton runs. Raises ConfigError when it is asked for on a GPU that cannot.
    """
    on_gpu = device.type == "cuda"
    if wanted is None:
        return why_not is None, f" ({why_not})" if why_not and on_gpu else ""
    if wanted and why_not and on_gpu:
        raise ConfigError(f"parallel.compile is true, and {why_not}", hint="drop it, or install triton")
    return wanted, ""


def compile_blocks(model: Model, *, fixed_shapes: bool) -> None:
    """Compile the blocks and the final norm when they are first called. `fixed_shapes`: all rows are of one length."""
    import torch._dynamo.config

    torch._dynamo.config.recompile_limit = VARIANTS
    for module in _compiled(model):
        module.forward = torch.compile(module.forward, fullgraph=True, dynamic=False if fixed_shapes else None)


def set_budget(share: float) -> None:
    """The share of what it would keep that the partitioner keeps of each block compiled from now on; 1: all of it."""
    import torch._functorch.config

    torch._functorch.config.activation_memory_budget = share


def run_eagerly(model: Model) -> None:
    """Take `compile_blocks` and recomputation back."""
    for module in _compiled(model):
        module.__dict__.pop("forward", None)


@contextmanager
def eagerly(module: nn.Module) -> Iterator[None]:
    """Run the blocks of a model, however it is wrapped, as they are written: for shapes that what is compiled should
    never see, as it would be compiled anew for them, and another code might then serve the training."""
    model = next(child for child in module.modules() if isinstance(child, Model))
    compiled = [(part, part.__dict__.pop("forward")) for part in _compiled(model) if "forward" in part.__dict__]
    try:
        yield
    finally:
        for part, forward in compiled:
            part.forward = forward


def is_compile_failure(error: BaseException) -> bool:
    """Whether the compiler or Triton failed, and not the model. What Triton raises for want of a C compiler or of
    Python's headers is told by where it comes from alone."""
    if any(kind.__module__.startswith(FAILURES) for kind in type(error).__mro__):
        return True
    frames = (frame for frame, _ in walk_tb(error.__traceback__))
    return any(str(frame.f_globals.get("__name__")).startswith("triton.") for frame in frames)


def _compiled(model: Model) -> Iterator[Any]:
    yield from model.units().compiled


# --- recomputation ---------------------------------------------------------------------------------------------------


def recompute_blocks(model: Model, mode: str, every: int) -> None:
    """Make every n-th block, the first included, keep less: `mode` none or budget, selective (KEPT_OPS) or full (its
    inputs).

    The recomputation is inside what FSDP wraps, so it sees the same gathered, cast parameters.
    """
    if mode in ("none", "budget"):  # a budget is the compiler's business
        return
    options: dict[str, Any] = {}
    if mode == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _keep)
    for block in list(model.blocks)[::every]:
        block.forward = _recomputed(block.forward, options)


def _recomputed(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    def wrapped(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args)
        return checkpoint(forward, *args, use_reentrant=False, **options)

    return wrapped


def _keep(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in KEPT_OPS else CheckpointPolicy.PREFER_RECOMPUTE
