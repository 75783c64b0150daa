"""Every key of `parallel` is observed at work: placements, collectives, what is kept, what is gathered, gradients."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from tests.oracles.reference import save_hf
from tests.support.gradients import (
    assert_same_grads,
    backward,
    config,
    full,
    grads_of_one,
    loss_and_grads,
    micro_batches,
    prepared,
)
from tests.support.ranks import run_ranks
from tests.support.saves import save
from tests.support.tiny import ALONE, tiny_shape
from trainer.checkpoint import load
from trainer.dist import Dist
from trainer.errors import ConfigError
from trainer.models.build import build_model, fill_weights
from trainer.models.families.decoder_shape import DecoderShape
from trainer.models.hf import load_pretrained, named_weights
from trainer.models.losses import sft_loss
from trainer.optim.build import build_optimizer
from trainer.parallel.backend import Backend
from trainer.parallel.choose import make_backend
from trainer.parallel.wrapping import plan_wrapping
from trainer.schema import LoraConfig
from trainer.tensors import local_tensor
from trainer.train.step import apply_update, clip_divisor

DEEP = {"num_layers": 4}
HYBRID = {"sharding_strategy": "HYBRID_SHARD", "dp_replicate": 2}


@pytest.fixture(scope="module")
def expected() -> dict[str, Tensor]:
    return grads_of_one()


# --- no option changes a gradient -------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "grad_op": {"sharding_strategy": "SHARD_GRAD_OP"},
    "no_shard": {"sharding_strategy": "NO_SHARD"},
    "size": {"wrap_policy": "size", "min_num_params": 2000},
    "classes": {"wrap_policy": "classes", "wrap_classes": ["Qwen3Attention", "MLP"]},
    "linears": {"wrap_policy": "classes", "wrap_classes": ["Linear"], "activation_checkpointing": "full"},
    "ignored": {"ignored_modules": ["model.embed_tokens", "*.input_layernorm", "model.layers.1.mlp"]},
    "forward_prefetch": {"forward_prefetch": 2},
    "backward_prefetch": {"backward_prefetch_depth": 2},
    "offload": {"cpu_offload": True},
    "offload_kept": {"cpu_offload": True, "reshard_after_forward": False},
    "ignored_kept": {"ignored_modules": ["model.layers.1.mlp"], "reshard_after_forward": False},
    "recomputed_kept": {"activation_checkpointing": "full", "sharding_strategy": "SHARD_GRAD_OP"},
    "selective": {"activation_checkpointing": "selective"},
    "every_second": {"activation_checkpointing": "full", "checkpoint_every": 2},
}


def grads_of_many(dist: Dist, options: list[dict[str, Any]], shape: DecoderShape) -> list[dict[str, Tensor]]:
    """The gradients with each of the options, over two micro-batches."""
    return [loss_and_grads(dist, config("fsdp", **one), shape, [2])[0][1] for one in options]


@pytest.fixture(scope="module")
def grads_by_option() -> dict[str, dict[str, Tensor]]:
    results = run_ranks(grads_of_many, 2, list(OPTIONS.values()), tiny_shape())
    return dict(zip(OPTIONS, results[1], strict=True))


@pytest.mark.parametrize("option", OPTIONS)
def test_no_option_of_fsdp_changes_a_gradient(option, grads_by_option, expected):
    assert_same_grads(grads_by_option[option], expected, 2e-6)


def grads_on_four(dist: Dist, shape: DecoderShape) -> list[dict[str, Tensor]]:
    kept = HYBRID | {"sharding_strategy": "_HYBRID_SHARD_ZERO2"}
    ignoring = HYBRID | {"ignored_modules": ["*.mlp"]}
    return grads_of_many(dist, [HYBRID, kept, ignoring, {"reshard_after_forward": 2}], shape)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_four_ranks_give_the_gradients_of_one_with_two_replicas_and_with_rows_fewer_than_ranks(tied):
    shape = tiny_shape(tie_embeddings=tied, head_dim=2)  # q_norm and k_norm have two rows, and four ranks share them
    ((_, grads),) = loss_and_grads(ALONE, config("pytorch"), shape, [1])
    for got in run_ranks(grads_on_four, 4, shape)[3]:
        assert_same_grads(got, grads, 2e-6)


# --- strategies -------------------------------------------------------------------------------------------------------


def placements_and_norm(dist: Dist, options: dict[str, Any]) -> tuple[str, tuple[int, ...], float]:
    backend, module = prepared(dist, config("fsdp", **options), tiny_shape())
    backward(backend, module, micro_batches(dist, 2))
    weight = module.model.layers[0].mlp.up_proj.weight
    return str(weight.placements), tuple(weight.device_mesh.shape), backend.grad_norm().item()


def test_hybrid_sharding_has_replicas_of_shards_and_the_norm_of_one_process(expected):
    results = run_ranks(placements_and_norm, 4, HYBRID)
    norm = torch.cat([grad.flatten() for grad in expected.values()]).norm().item()
    assert [result[:2] for result in results] == [("(Replicate(), Shard(dim=0))", (2, 2))] * 4
    assert [result[2] for result in results] == [pytest.approx(norm, rel=1e-6)] * 4


class Collectives(TorchDispatchMode):
    """Counts the collectives of what runs in it, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for name in ("allgather", "reduce_scatter", "allreduce"):
            self.seen[name] += str(func).startswith("c10d.") and name in str(func)
        return func(*args, **(kwargs or {}))


def collectives(dist: Dist, options: dict[str, Any], steps: int) -> dict[str, int]:
    backend, module = prepared(dist, config("fsdp", **options), tiny_shape())
    backward(backend, module, micro_batches(dist, 1))
    with Collectives() as counted:
        backward(backend, module, micro_batches(dist, steps))
    return dict(counted.seen)


def test_hybrid_sharding_reduces_once_a_step_however_many_micro_batches():
    seen = run_ranks(collectives, 4, HYBRID, 4)[0]
    assert (seen["reduce_scatter"], seen["allreduce"]) == (3, 3)  # two blocks and the root


def gathers(dist: Dist) -> list[int]:
    options: list[dict[str, Any]] = [{}, {"sharding_strategy": "SHARD_GRAD_OP"}, {"reshard_after_forward": False}]
    return [collectives(dist, one, 1)["allgather"] for one in options]


def test_grad_op_gathers_each_block_once_where_full_shard_does_so_twice():
    assert run_ranks(gathers, 2)[0] == [5, 3, 3]


def gathers_of_four_micro_batches(dist: Dist) -> list[int]:
    options: list[dict[str, Any]] = [{}, {"reshard_after_forward": False}]
    return [collectives(dist, one, 4)["allgather"] for one in options]


def test_what_is_kept_is_gathered_once_a_step_however_many_micro_batches():
    assert run_ranks(gathers_of_four_micro_batches, 2)[0] == [17, 3]  # two blocks, and the root, which is kept always


def trained(dist: Dist, options: dict[str, Any], *, rearranged: dict[str, Any] | None = None) -> list[Any]:
    """Of three steps with an evaluation after each: its loss, the weights as they are saved, what is gathered."""
    backend, module = prepared(dist, config("fsdp", **options), tiny_shape())
    found = []
    for _ in range(3):
        backward(backend, module, micro_batches(dist, 2))
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.sub_(0.1 * parameter.grad)
            module.zero_grad()
            loss = sft_loss(module, micro_batches(dist, 1)[0]).total.item()
        kept = not isinstance(module.model.layers[0].mlp.up_proj.weight, DTensor)
        found.append((loss, kept, {name: full(weight) for name, weight in module.state_dict().items()}))
        if rearranged is not None:
            backend.rearrange(config("fsdp", **rearranged))
    return found


def trained_either_way(dist: Dist) -> list[list[Any]]:
    kept = {"reshard_after_forward": False}
    return [trained(dist, {}), trained(dist, kept), trained(dist, kept, rearranged={})]


def test_steps_evaluations_and_saves_are_the_same_bit_for_bit_whether_gathered_copies_are_kept():
    freed, kept, changed = run_ranks(trained_either_way, 2)[0]
    assert [[one[1] for one in run] for run in (freed, kept, changed)] == [
        [False] * 3,
        [True] * 3,
        [True, False, False],
    ]
    assert freed[0][0] != freed[1][0]
    for run in (kept, changed):
        for (loss, _, weights), (want, _, expected) in zip(run, freed, strict=True):
            assert loss == want
            assert all(torch.equal(weights[name], expected[name]) for name in expected)


def kept_rows(dist: Dist, reshard: int) -> tuple[int, int]:
    module = prepared(dist, config("fsdp", reshard_after_forward=reshard), tiny_shape())[1]
    weight = module.model.layers[0].mlp.up_proj.weight
    before = local_tensor(weight).shape[0]
    sft_loss(module, micro_batches(dist, 1)[0])
    return before, local_tensor(module.model.layers[0].mlp.up_proj.weight).shape[0]


def test_a_number_keeps_parameters_sharded_over_so_many_ranks_after_the_forward():
    assert run_ranks(kept_rows, 4, 2) == [(12, 24)] * 4


def backend_and_module(dist: Dist) -> tuple[str, str]:
    backend, module = prepared(dist, config("fsdp", sharding_strategy="NO_SHARD"), tiny_shape())
    return type(module).__name__, backend.describe()


def test_no_shard_is_ddp_and_says_what_it_costs():
    kind, text = run_ranks(backend_and_module, 2)[0]
    assert kind == "DistributedDataParallel"
    assert text.startswith("ddp (NO_SHARD), 2 rank(s): 18,784 parameters")
    assert "nothing is sharded: FULL_SHARD needs less" in text


# --- prefetch ---------------------------------------------------------------------------------------------------------


def gathered_when_blocks_run(dist: Dist, options: dict[str, Any]) -> tuple[int, int]:
    """Gathers issued when the first block runs forward, and of the backward's when the last block runs it."""
    backend, module = prepared(dist, config("fsdp", **options), tiny_shape(**DEEP))
    backward(backend, module, micro_batches(dist, 1))
    at: dict[str, int] = {}
    blocks = module.model.layers
    with Collectives() as counted:

        def note(key: str) -> None:
            at.setdefault(key, counted.seen["allgather"])

        blocks[0].input_layernorm.register_forward_pre_hook(lambda *_: note("forward"))
        blocks[3].mlp.register_full_backward_pre_hook(lambda *_: note("backward"))
        backend.sync(True)
        loss = sft_loss(module, micro_batches(dist, 1)[0]).total
        note("between")
        loss.backward()
    return at["forward"], at["backward"] - at["between"]


@pytest.mark.parametrize(
    ("options", "ahead"),
    [
        ({}, (2, 2)),  # the root and the first block; the last block and the one before it
        ({"forward_prefetch": True}, (3, 2)),
        ({"forward_prefetch": 2, "backward_prefetch_depth": 2}, (4, 3)),
    ],
    ids=["built-in", "true", "two"],
)
def test_prefetch_gathers_so_many_blocks_ahead(options, ahead):
    assert run_ranks(gathered_when_blocks_run, 2, options)[0] == ahead


# --- wrapping ---------------------------------------------------------------------------------------------------------


def groups_of(options: dict[str, Any], **shape: Any) -> list[str]:
    cfg = config("fsdp", **options)
    plan = plan_wrapping(build_model(cfg, tiny_shape(**shape)), cfg, 2)
    return [group.name for group in plan.groups]


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, ["model.layers.0", "model.layers.1", ""]),
        ({"wrap_policy": "size", "min_num_params": 7000}, ["model.layers.1", "model.layers.0", ""]),
        ({"wrap_policy": "size", "min_num_params": 4000}, ["model.layers.1.mlp", "model.layers.0.mlp", ""]),
        ({"wrap_policy": "classes", "wrap_classes": ["Qwen3DecoderLayer"]}, ["model.layers.0", "model.layers.1", ""]),
        (
            {"wrap_policy": "classes", "wrap_classes": ["MLP", "Block"]},
            ["model.layers.0.mlp", "model.layers.1.mlp", "model.layers.0", "model.layers.1", ""],
        ),
    ],
)
def test_the_wrap_policy_chooses_the_groups(options, names):
    assert groups_of(options) == names


@pytest.mark.parametrize("options", [{}, {"wrap_policy": "size", "min_num_params": 3000}], ids=["transformer", "size"])
def test_an_untied_embedding_and_its_head_are_groups_and_a_tied_one_never(options):
    assert {"model.embed_tokens", "lm_head"} < set(groups_of(options, tie_embeddings=False))
    assert "model.embed_tokens" not in groups_of(options)


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        (
            {"wrap_policy": "classes", "wrap_classes": ["LlamaDecoderLayer"]},
            "parallel.wrap_classes names LlamaDecoderLayer, no class of this model that can be a group",
            "known: Attention, Block, Linear, MLP, Qwen3Attention, Qwen3DecoderLayer, Qwen3MLP, Qwen3RMSNorm, RMSNorm",
        ),
        (
            {"wrap_policy": "size", "min_num_params": 8000},
            "parallel.min_num_params is 8,000, and the largest module that can be a group has 7,760",
            "set it to at most 7760, or use parallel.wrap_policy=transformer",
        ),
        (
            {"ignored_modules": ["model.embedding"]},
            "parallel.ignored_modules has 'model.embedding', which matches nothing in this model",
            "did you mean model.embed_tokens or model.norm or model.layers?",
        ),
    ],
    ids=["class", "size", "ignored"],
)
def test_what_the_model_has_not_cannot_be_wrapped(options, message, hint):
    with pytest.raises(ConfigError) as caught:
        groups_of(options)
    assert caught.value.message == message
    assert caught.value.hint.startswith(hint)


def wrapped_and_shares(dist: Dist, options: dict[str, Any]) -> tuple[list[str], int, int]:
    backend, module = prepared(dist, config("fsdp", **options), tiny_shape())
    wrapped = [name for name, child in module.named_modules() if isinstance(child, FSDPModule)]
    return wrapped, sum(local_tensor(p).numel() for p in module.parameters()), backend.plan.local_params


def test_the_plan_is_what_fsdp_does():
    options = {"wrap_policy": "classes", "wrap_classes": ["MLP"], "ignored_modules": ["model.layers.0.self_attn"]}
    (wrapped, held, planned), (_, others, _) = run_ranks(wrapped_and_shares, 2, options)
    assert wrapped == ["", "model.layers.0.mlp", "model.layers.1.mlp"]
    assert held == planned
    assert held + others == 18_784 + 3_088  # an ignored module is whole on both


def ignored_kinds(dist: Dist) -> tuple[list[str], float, float]:
    cfg = config("fsdp", ignored_modules=["model.embed_tokens", "*.mlp"])
    backend, module = prepared(dist, cfg, tiny_shape())
    backward(backend, module, micro_batches(dist, 2))
    plain = [name for name, p in module.named_parameters() if not isinstance(p, DTensor)]
    norm = backend.grad_norm()
    backend.scale_grads(1.0 / clip_divisor(norm, 0.5))
    return plain, norm.item(), backend.grad_norm().item()


def test_ignored_modules_are_whole_and_count_once_in_the_norm(expected):
    for plain, norm, clipped in run_ranks(ignored_kinds, 2):
        assert plain[0] == "model.embed_tokens.weight"
        assert len(plain) == 1 + 2 * 3
        assert norm == pytest.approx(torch.cat([g.flatten() for g in expected.values()]).norm().item(), rel=1e-6)
        assert clipped == pytest.approx(0.5, rel=1e-5)


def adapters_over_whole_modules(dist: Dist) -> dict[str, Tensor]:
    """Gradients of adapters where some frozen modules and one adapter are whole on every rank."""
    lora = LoraConfig(rank=2, targets=["q_proj", "up_proj"])
    options = {"ignored_modules": ["*.mlp.*", "*.q_norm"]} | (HYBRID if dist.world_size > 1 else {})
    name = "fsdp" if dist.world_size > 1 else "pytorch"
    cfg = replace(config(name, **(options if dist.world_size > 1 else {})), lora=lora)
    backend = make_backend(cfg, dist)
    module = backend.prepare(build_model(cfg, tiny_shape()))
    fill_weights(cfg, module, None)
    backward(backend, module, micro_batches(dist, 2))
    return {name: full(p.grad) for name, p in named_weights(module) if p.grad is not None}


def test_adapters_over_ignored_frozen_modules_have_the_gradients_of_one_process():
    want = adapters_over_whole_modules(ALONE)
    assert len(want) == 2 * 2 * 2  # two blocks, two targets, a pair each
    assert_same_grads(run_ranks(adapters_over_whole_modules, 2)[1], want, 2e-6)


# --- offload ----------------------------------------------------------------------------------------------------------


def two_steps(dist: Dist, options: dict[str, Any]) -> tuple[dict[str, Tensor], bool]:
    """The weights after an update and a skipped one, and whether FSDP keeps them on the CPU."""
    cfg = config("fsdp" if options else "pytorch", **options)
    backend, module = prepared(dist, cfg, tiny_shape())
    optimizer = build_optimizer(module, cfg.optim)
    for finite in (True, False):
        backward(backend, module, micro_batches(dist, 2))
        divisor = clip_divisor(backend.grad_norm(), 1.0)
        apply_update(optimizer, 1e-2, torch.tensor(finite), divisor=divisor)
    offloaded = [
        parameter.offload_to_cpu
        for child in module.modules()
        if isinstance(child, FSDPModule)
        for parameter in child._get_fsdp_state()._fsdp_param_group.fsdp_params
    ]
    weights = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in module.named_parameters()}
    return {n: w.detach().clone() for n, w in weights.items()}, bool(offloaded) and all(offloaded)


def test_offloaded_parameters_step_on_the_cpu_and_a_skipped_step_changes_nothing():
    want, _ = two_steps(ALONE, {})
    got, offloaded = run_ranks(two_steps, 2, {"cpu_offload": True})[0]
    assert offloaded
    for name, weight in want.items():
        torch.testing.assert_close(got[name], weight, atol=2e-5, rtol=0)


# --- weights ----------------------------------------------------------------------------------------------------------


def sent_weights(dist: Dist, folders: list[str], options: dict[str, Any]) -> dict[str, Tensor]:
    cfg = config("fsdp", **options)
    module = make_backend(cfg, dist).prepare(build_model(cfg, tiny_shape()))
    load_pretrained(module, folders[dist.rank], sender=dist)
    weights = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in module.named_parameters()}
    return {n: w.detach().clone() for n, w in weights.items()}


@pytest.mark.parametrize("options", [{}, HYBRID], ids=["full", "hybrid"])
def test_rank_0_alone_reads_the_weights_and_sends_them(options, tmp_path):
    theirs = dict(save_hf(tiny_shape(), tmp_path).named_parameters())
    folders = [str(tmp_path), *["/nowhere"] * 3]
    for got in run_ranks(sent_weights, 4, folders, options):
        assert all(torch.equal(got[name], tensor) for name, tensor in theirs.items())


def failed_sending(dist: Dist, folder: str) -> str:
    cfg = config("fsdp")
    module = make_backend(cfg, dist).prepare(build_model(cfg, tiny_shape(num_layers=1)))
    try:
        load_pretrained(module, folder, sender=dist)
    except Exception as error:
        return str(error)
    return ""


def test_a_failure_of_rank_0_to_read_is_told_by_every_rank(tmp_path):
    save_hf(tiny_shape(), tmp_path)
    assert all("Unexpected: model.layers.1" in text for text in run_ranks(failed_sending, 2, str(tmp_path)))


# --- checkpoints ------------------------------------------------------------------------------------------------------


def step_and_save(dist: Dist, options: dict[str, Any], shape: DecoderShape, folder: Path) -> dict[str, Tensor]:
    """Save after one step, and give the weights after another."""
    cfg = config("fsdp", **options)
    backend, module = prepared(dist, cfg, shape)
    optimizer = build_optimizer(module, cfg.optim)
    one_step(backend, module, optimizer, dist)
    save(folder, 1, module, optimizer, {}, dist)
    return one_step(backend, module, optimizer, dist)


def load_and_step(dist: Dist, options: dict[str, Any], shape: DecoderShape, folder: Path) -> dict[str, Tensor]:
    cfg = config("fsdp", **options)
    backend, module = prepared(dist, cfg, shape)
    optimizer = build_optimizer(module, cfg.optim)
    load.load(folder / "step_000001", module, optimizer, dist)
    return one_step(backend, module, optimizer, dist)


def one_step(backend: Backend, module: nn.Module, optimizer: Optimizer, dist: Dist) -> dict[str, Tensor]:
    backward(backend, module, micro_batches(dist, 1))
    apply_update(optimizer, 1e-2, torch.tensor(True), divisor=clip_divisor(backend.grad_norm(), 1.0))
    return {name: full(parameter.detach()) for name, parameter in named_weights(module)}


@pytest.mark.parametrize(
    ("tied", "saved", "loaded"),
    [
        (True, HYBRID, {}),
        (False, {"ignored_modules": ["*.mlp"]}, HYBRID | {"cpu_offload": True}),
        (
            True,
            {"wrap_policy": "classes", "wrap_classes": ["MLP"], "cpu_offload": True},
            {"ignored_modules": ["*.mlp"]},
        ),
    ],
    ids=["hybrid", "ignored", "offloaded"],
)
def test_a_checkpoint_goes_on_under_any_other_sharding(tied, saved, loaded, tmp_path):
    shape = tiny_shape(tie_embeddings=tied, head_dim=2)
    want = run_ranks(step_and_save, 4, saved, shape, tmp_path)[0]
    got = run_ranks(load_and_step, 4 if "dp_replicate" in loaded else 2, loaded, shape, tmp_path)[1]
    assert got.keys() == want.keys()
    assert ("lm_head.weight" in got) is not tied
    for name, weight in want.items():
        torch.testing.assert_close(got[name], weight, atol=2e-5, rtol=0)
