"""How each block runs: compiled if possible, and which of its activations are recomputed.

Only the forward is compiled, so FSDP's hooks stay outside of it and parameters keep their names. All blocks are of the
same kind and share the code compiled for the first.
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
"""The maximum number of graphs per block. Rows of any length, one or several, with and without gradients, with frozen
and trained inputs, need about 15. At torch's own limit of 8 the run would fail, because graph breaks are forbidden."""
FAILURES = ("torch._dynamo.exc", "torch._inductor", "triton")
"""Modules whose exceptions mean that compilation failed."""
aten = torch.ops.aten
KEPT_OPS: frozenset[Any] = frozenset(
    packet.default
    for packet in (
        aten.mm,
        aten.addmm,
        aten.bmm,
        aten.baddbmm,
        aten._scaled_mm,  # products in float8
        aten.max,  # a tensor's maximum, by which it is scaled for float8
        aten._scaled_dot_product_flash_attention,
        aten._scaled_dot_product_efficient_attention,
        aten._scaled_dot_product_cudnn_attention,
        aten._scaled_dot_product_flash_attention_for_cpu,
        aten._scaled_dot_product_fused_attention_overrideable,
        aten._flash_attention_forward,
        aten._efficient_attention_forward,
    )
) | {flex_attention}
"""Matrix products and attention, which are expensive to compute; a block's other values are cheap and large."""


def decide_compile(wanted: bool | None, device: torch.device, *, why_not: str | None) -> tuple[bool, str]:
    """Whether blocks are compiled; and, if this was left open, why not. `why_not`: why Triton cannot run there.

    `wanted` None: compile wherever Triton runs. Raises ConfigError if it is requested on a GPU that cannot run Triton.
    """
    on_gpu = device.type == "cuda"
    if wanted is None:
        return why_not is None, f" ({why_not})" if why_not and on_gpu else ""
    if wanted and why_not and on_gpu:
        raise ConfigError(f"parallel.compile is true, and {why_not}", hint="drop it, or install triton")
    return wanted, ""


def compile_blocks(model: Model, *, fixed_shapes: bool) -> None:
    """Compile the blocks and the final norm at their first call. `fixed_shapes`: all rows have the same length."""
    import torch._dynamo.config

    torch._dynamo.config.recompile_limit = VARIANTS
    for module in _compiled(model):
        module.forward = torch.compile(module.forward, fullgraph=True, dynamic=False if fixed_shapes else None)


def set_budget(share: float) -> None:
    """For blocks compiled from now on, set the share of activations that the partitioner keeps; 1: all of them."""
    import torch._functorch.config

    torch._functorch.config.activation_memory_budget = share


def run_eagerly(model: Model) -> None:
    """Undo `compile_blocks` and recomputation."""
    for module in _compiled(model):
        module.__dict__.pop("forward", None)


@contextmanager
def eagerly(module: nn.Module) -> Iterator[None]:
    """Run the blocks of a model, wrapped or not, without compilation. For shapes that compiled code must not get: it
    would be recompiled for them, and the training might then use other code."""
    model = next(child for child in module.modules() if isinstance(child, Model))
    compiled = [(part, part.__dict__.pop("forward")) for part in _compiled(model) if "forward" in part.__dict__]
    try:
        yield
    finally:
        for part, forward in compiled:
            part.forward = forward


def is_compile_failure(error: BaseException) -> bool:
    """Whether the compiler or Triton failed, and not the model. Triton's errors for a missing C compiler or missing
    Python headers are recognized only by the code that raised them."""
    if any(kind.__module__.startswith(FAILURES) for kind in type(error).__mro__):
        return True
    frames = (frame for frame, _ in walk_tb(error.__traceback__))
    return any(str(frame.f_globals.get("__name__")).startswith("triton.") for frame in frames)


def _compiled(model: Model) -> Iterator[Any]:
    yield from model.units().compiled


# --- recomputation ---------------------------------------------------------------------------------------------------


def recompute_blocks(model: Model, mode: str, every: int) -> None:
    """Make every `every`-th block, from the first on, keep less. `mode`: none or budget (no change), selective (keeps
    the results of KEPT_OPS) or full (keeps only its inputs).

    The recomputation is inside the module that FSDP wraps, so it uses the same gathered, cast parameters.
    """
    if mode in ("none", "budget"):  # the compiler handles a budget
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
