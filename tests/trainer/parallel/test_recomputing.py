"""Activations that are kept or computed again: how many, in which dtype, and the same gradients in every way."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.gradients import (
    ROWS,
    assert_same_grads,
    config,
    grads_of_one,
    loss_and_grads,
    micro_batches,
    prepared,
)
from tests.support.ranks import run_ranks
from tests.support.tiny import ALONE, packed_batch, tiny_shape
from trainer.dist import Dist
from trainer.errors import ConfigError
from trainer.models.build import build_model
from trainer.models.losses import sft_loss
from trainer.parallel.wrapping import plan_wrapping

# --- activation checkpointing -----------------------------------------------------------------------------------------

DEEP = {"num_layers": 4}


@pytest.fixture(scope="module")
def expected() -> dict[str, Tensor]:
    return grads_of_one()


class Products(TorchDispatchMode):
    """The dtypes of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.addmm.default):
            self.dtypes.append(args[-1].dtype)
        return func(*args, **(kwargs or {}))


def kept_and_computed(dist: Dist, options: dict[str, Any]) -> tuple[int, Counter[torch.dtype], int]:
    """Bytes kept for the backward, the dtypes kept, and the matrix products of the backward."""
    backend, module = prepared(dist, config("auto", precision="bf16", **options), tiny_shape(**DEEP))
    kept: list[Tensor] = []
    backend.sync(True)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        loss = sft_loss(module, micro_batches(dist, 1)[0]).total
    with Products() as products:
        loss.backward()
    return sum(x.nbytes for x in kept), Counter(x.dtype for x in kept), len(products.dtypes)


def test_selective_keeps_products_and_full_computes_them_again():
    modes = ("none", "selective", "full")
    (all_kept, _, once), (_, _, selective), (kept, _, twice) = (
        kept_and_computed(ALONE, {"activation_checkpointing": mode}) for mode in modes
    )
    assert kept < 0.2 * all_kept
    assert selective == once
    assert twice == once + 4 * 6  # in each of four blocks, all but the last product, whose output nobody needs


def test_every_second_block_keeps_about_half_of_what_full_saves():
    modes: list[dict[str, Any]] = [{}, {"checkpoint_every": 2}, {"checkpoint_every": 1}]
    none, half, full = (
        kept_and_computed(ALONE, {"activation_checkpointing": "full" if mode else "none"} | mode)[0] for mode in modes
    )
    assert half == pytest.approx((none + full) / 2, rel=0.05)


def recomputed_dtypes(dist: Dist, mode: str) -> Counter[torch.dtype]:
    cfg = config("fsdp", precision="bf16", activation_checkpointing=mode)
    backend, module = prepared(dist, cfg, tiny_shape(**DEEP))
    backend.sync(True)
    loss = sft_loss(module, micro_batches(dist, 1)[0]).total
    seen: list[torch.dtype] = []
    for block in module.model.layers:
        block.mlp.up_proj.register_forward_hook(lambda _module, inputs, output: seen.append(output.dtype))
    loss.backward()
    return Counter(seen)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_block_is_computed_again_in_the_dtype_of_its_forward(world_size):
    assert run_ranks(recomputed_dtypes, world_size, "full")[0] == Counter({torch.bfloat16: 4})


def kept_when_compiled(dist: Dist, share: float) -> int:
    """Bytes that compiled blocks keep for the backward; the freed copies of gathered weights have none."""
    cfg = config("fsdp", activation_checkpointing="budget", activation_budget=share, compile=True)
    backend, module = prepared(dist, cfg, tiny_shape())
    backend.sync(True)
    kept: dict[int, Tensor] = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.setdefault(id(x.untyped_storage()), x), lambda x: x):
        sft_loss(module, micro_batches(dist, 1)[0])
    return sum(x.untyped_storage().nbytes() for x in kept.values())


@pytest.mark.soak
def test_activation_budget_of_nothing_keeps_less_than_a_third():
    none, whole = (run_ranks(kept_when_compiled, 1, share)[0] for share in (0.0, 1.0))
    assert none < whole / 3


@pytest.mark.parametrize(("mode", "told"), [("budget", 0.3), ("none", 1.0)])
def test_activation_budget_is_what_the_partitioner_is_told(mode, told):
    options = {"activation_checkpointing": mode, "activation_budget": 0.3, "compile": True}
    prepared(ALONE, config("auto", precision="fp32", **options), tiny_shape())
    assert functorch_config.activation_memory_budget == told


def test_budget_without_a_compiler_is_an_error_with_a_way_out():
    with pytest.raises(ConfigError, match="activation_checkpointing is budget, which needs a compiler") as caught:
        prepared(ALONE, config("auto", activation_checkpointing="budget"), tiny_shape())
    assert caught.value.hint == "set parallel.activation_checkpointing=selective"


# --- the matrix -------------------------------------------------------------------------------------------------------


@pytest.mark.soak
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("mode", "compiled"),
    [*((mode, compiled) for mode in ("none", "selective", "full") for compiled in (False, True)), ("budget", True)],
)
def test_recomputation_and_compile_give_the_same_gradients_on_one_and_two_ranks(mode, compiled, world_size, expected):
    cfg = config("fsdp", activation_checkpointing=mode, compile=compiled)
    ((_, got),) = run_ranks(loss_and_grads, world_size, cfg, tiny_shape(), [2])[0]
    assert_same_grads(got, expected, 2e-6)


def test_gradients_of_several_micro_batches_are_kept_whole_and_the_plan_says_how_large():
    plan = plan_wrapping(build_model(config("fsdp"), tiny_shape()), config("fsdp"), 4)
    assert plan.unsharded_grad_bytes == 4 * 18_784
    assert plan.render()[-1].startswith("with several micro-batches a step, whole gradients wait between them")


def whole_gradients(dist: Dist) -> int:
    backend, module = prepared(dist, config("fsdp"), tiny_shape())
    backend.sync(False)
    sft_loss(module, packed_batch(ROWS, length=24)).total.backward()
    return sum(
        parameter.unsharded_accumulated_grad.nbytes
        if parameter.unsharded_accumulated_grad is not None
        else parameter._unsharded_param.grad.nbytes
        for child in module.modules()
        if isinstance(child, FSDPModule)
        for parameter in child._get_fsdp_state()._fsdp_param_group.fsdp_params
    )


def test_what_waits_between_micro_batches_is_what_the_plan_says():
    assert run_ranks(whole_gradients, 2) == [4 * 18_784] * 2
