"""The backends give one answer on any number of ranks. Ranks are real processes that talk over gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.oracles.reference import save_hf
from tests.support.gradients import (
    assert_same_grads,
    backward,
    config,
    full,
    full_grads,
    loss_and_grads,
    micro_batches,
    prepared,
)
from tests.support.ranks import barrier, run_ranks
from tests.support.tiny import ALONE, export_model, tiny_shape
from trainer.dist import (
    Dist,
    DistError,
    FlagBoard,
    on_rank0,
    rank0_first,
    read_ranks,
    stop_dist,
    sum_over_ranks,
)
from trainer.errors import ModelError
from trainer.models.build import build_model
from trainer.models.families.decoder import Decoder
from trainer.models.families.decoder_shape import DecoderShape
from trainer.models.hf import gather_full, load_pretrained
from trainer.models.losses import sft_loss
from trainer.parallel.choose import make_backend
from trainer.schema import Config
from trainer.tensors import local_tensor
from trainer.train.step import clip_divisor

# --- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "world_size", "options"),
    [
        ("fsdp", 2, {"activation_checkpointing": "full"}),
        ("ddp", 2, {"activation_checkpointing": "full"}),
        ("fsdp", 2, {"reshard_after_forward": False}),
        ("ddp", 1, {"compile": True}),
        ("fsdp", 2, {"activation_checkpointing": "full", "compile": True}),
    ],
    ids=["fsdp-checkpointing", "ddp-checkpointing", "fsdp-kept", "ddp-compile", "fsdp-checkpointing-compile"],
)
def test_memory_and_speed_options_change_no_gradient(backend, world_size, options):
    shape = tiny_shape()
    ((_, grads),) = loss_and_grads(ALONE, config("pytorch"), shape, [1])
    cfg = config(backend, **options)
    ((_, got),) = run_ranks(loss_and_grads, world_size, cfg, shape, [2])[0]
    assert_same_grads(got, grads, 2e-6)


def kept_for_backward(option: str) -> list[Tensor]:
    """What autograd keeps from a bf16 forward, without the parameters."""
    cfg = config("pytorch", precision="bf16", activation_checkpointing=option)
    module = prepared(ALONE, cfg, tiny_shape())[1]
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        sft_loss(module, micro_batches(ALONE, 1)[0])
    return kept


def test_activation_checkpointing_keeps_less_than_a_fifth_for_the_backward_pass():
    kept, all_kept = (sum(x.nbytes for x in kept_for_backward(option)) for option in ("full", "none"))
    assert kept < 0.2 * all_kept


def gathered_after_forward(dist: Dist, cfg: Config) -> bool:
    module = prepared(dist, cfg, tiny_shape())[1]
    sft_loss(module, micro_batches(dist, 1)[0])
    return not isinstance(module.blocks[0].mlp.up_proj.weight, DTensor)


@pytest.mark.parametrize("freed", [True, False])
def test_fsdp_frees_a_blocks_parameters_after_its_forward_when_asked(freed):
    assert run_ranks(gathered_after_forward, 2, config("fsdp", reshard_after_forward=freed)) == [not freed] * 2


@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
def test_a_bf16_reduction_rounds_the_gradients_and_no_more(backend):
    shape = tiny_shape()
    ((_, exact),) = loss_and_grads(ALONE, config("pytorch"), shape, [1])
    ((_, got),) = run_ranks(loss_and_grads, 2, config(backend, reduce_dtype="bf16"), shape, [1])[0]
    for name, grad in got.items():
        assert torch.equal(grad, grad.bfloat16().float())
        torch.testing.assert_close(grad, exact[name], atol=0.01 * exact[name].abs().max().item(), rtol=0)


@pytest.mark.parametrize(("backend", "world_size"), [("pytorch", 1), ("ddp", 2), ("fsdp", 1), ("fsdp", 2)])
def test_bf16_gradients_are_off_by_the_same_error_on_every_backend(backend, world_size):
    shape = tiny_shape()
    ((_, exact),) = loss_and_grads(ALONE, config("pytorch"), shape, [1])
    ((_, single),) = loss_and_grads(ALONE, config("pytorch", precision="bf16"), shape, [1])
    ((_, got),) = run_ranks(loss_and_grads, world_size, config(backend, precision="bf16"), shape, [1])[0]
    assert all(grad.dtype == torch.float32 for grad in got.values())
    for name, grad in got.items():
        error, reference = (grad - exact[name]).norm(), (single[name] - exact[name]).norm()
        assert 0 < error <= 2 * reference, name


# --- clipping ---------------------------------------------------------------------------------------------------------


def norm_and_clipped(dist: Dist, cfg: Config, max_norm: float) -> tuple[Tensor, dict]:
    backend, module = prepared(dist, cfg, tiny_shape())
    backward(backend, module, micro_batches(dist, 1))
    norm = backend.grad_norm()
    backend.scale_grads(1.0 / clip_divisor(norm, max_norm))
    return norm, full_grads(module)


def test_max_norm_of_zero_reports_and_leaves_the_gradients():
    norm, grads = norm_and_clipped(ALONE, config("pytorch"), 0.0)
    assert norm.item() == pytest.approx(torch.cat([grad.flatten() for grad in grads.values()]).norm().item(), rel=1e-6)


def test_a_gradient_that_is_not_finite_shows_in_the_norm():
    backend, module = prepared(ALONE, config("pytorch"), tiny_shape())
    backward(backend, module, micro_batches(ALONE, 1))
    next(module.parameters()).grad[0, 0] = float("inf")
    assert not backend.grad_norm().isfinite()


def test_gradients_on_two_devices_are_scaled_each_on_its_own():
    backend = make_backend(config("pytorch"), ALONE)
    backend.module = nn.ModuleList([nn.Linear(2, 2, bias=False, device="meta"), nn.Linear(2, 2, bias=False)])
    for parameter in backend.module.parameters():  # meta stands for a second device
        parameter.grad = torch.ones_like(parameter)
    backend.scale_grads(torch.tensor(0.5))
    assert backend.module[1].weight.grad.tolist() == [[0.5, 0.5], [0.5, 0.5]]


# --- weights ----------------------------------------------------------------------------------------------------------


def initial_weights(dist: Dist, cfg: Config) -> dict | None:
    return gather_full(prepared(dist, cfg, tiny_shape())[1], dist)


@pytest.mark.parametrize(("backend", "world_size"), [("ddp", 2), ("fsdp", 1), ("fsdp", 2), ("fsdp", 3)])
def test_random_weights_are_the_same_on_any_number_of_ranks(backend, world_size):
    expected = initial_weights(ALONE, config("pytorch"))
    got, *others = run_ranks(initial_weights, world_size, config(backend))
    assert others == [None] * (world_size - 1)
    assert list(got) == list(expected)
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())


def buffers_of_all_backends(dist: Dist) -> list[dict[str, Tensor]]:
    cfgs = [config("ddp", precision="bf16"), config("fsdp", precision="bf16"), config("fsdp", cpu_offload=True)]
    cfgs += [config("pytorch", precision="bf16")] if dist.world_size == 1 else []
    modules = (prepared(dist, cfg, tiny_shape())[1] for cfg in cfgs)
    return [{name.removeprefix("module."): full(tensor) for name, tensor in m.named_buffers()} for m in modules]


@pytest.mark.parametrize("world_size", [1, 2])
def test_every_buffer_made_without_storage_is_that_of_a_model_made_on_the_cpu(world_size):
    expected = dict(Decoder(tiny_shape()).named_buffers())
    for found in (one for rank in run_ranks(buffers_of_all_backends, world_size) for one in rank):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def load_and_gather(dist: Dist, cfg: Config, shape: DecoderShape, folder: Path) -> tuple[dict | None, int, Tensor]:
    module = make_backend(cfg, dist).prepare(build_model(cfg, shape))
    load_pretrained(module, folder)
    buffer = (module.module if cfg.target.train_backend == "ddp" else module).model.inv_freq
    return gather_full(module, dist), sum(local_tensor(p).numel() for p in module.parameters()), buffer


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_fsdp_loads_a_hugging_face_folder_into_shards_and_stays_tied(tied, tmp_path):
    shape = tiny_shape(tie_embeddings=tied)
    theirs = dict(save_hf(shape, tmp_path).named_parameters())
    results = run_ranks(load_and_gather, 2, config("fsdp"), shape, tmp_path)
    got = results[0][0]
    assert got.keys() == theirs.keys()
    assert ("lm_head.weight" in got) is not tied
    assert all(torch.equal(got[name], tensor) for name, tensor in theirs.items())
    assert all(torch.equal(buffer, Decoder(shape).model.inv_freq) for _, _, buffer in results)


def test_fsdp_ranks_hold_their_share_alone(tmp_path):
    save_hf(tiny_shape(), tmp_path)
    counts = [count for _, count, _ in run_ranks(load_and_gather, 2, config("fsdp"), tiny_shape(), tmp_path)]
    assert sum(counts) == tiny_shape().num_params
    assert max(counts) <= 0.51 * tiny_shape().num_params


def export_after_evaluation(dist: Dist, cfg: Config, folder: Path) -> dict[str, bool]:
    """Export right after an evaluation, which leaves the root group's parameters gathered in bf16."""
    module = prepared(dist, cfg, tiny_shape())[1]
    with torch.no_grad():
        sft_loss(module, micro_batches(dist, 1)[0])
    export_model(folder, module, shape=tiny_shape(), rows=[[1, 2]], dist=dist)
    return {
        "done": (folder / "config.json").exists(),
        "compiled": torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0,
    }


@pytest.mark.parametrize(("backend", "compiled"), [("ddp", False), ("fsdp", True)])
def test_an_export_of_a_wrapped_bf16_model_has_fresh_names_and_fp32_weights(backend, compiled, tmp_path):
    cfg = config(backend, precision="bf16", activation_checkpointing="full", compile=compiled)
    results = run_ranks(export_after_evaluation, 2, cfg, tmp_path / "export")
    assert results == [{"done": True, "compiled": compiled}] * 2
    expected = initial_weights(ALONE, config("pytorch"))
    got = load_file(tmp_path / "export" / "model.safetensors")
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())


def export_not_finite(dist: Dist, folder: Path) -> str:
    module = prepared(dist, config("fsdp"), tiny_shape())[1]
    local_tensor(module.model.norm.weight).data.fill_(float("nan"))
    with pytest.raises((ModelError, DistError)) as caught:
        export_model(folder, module, shape=tiny_shape(), rows=[[1]], dist=dist)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_failed_export_raises_on_every_rank(tmp_path):
    first, second = run_ranks(export_not_finite, 2, tmp_path / "export")
    assert first == "ModelError: not exported: model.norm.weight has values that are not finite"
    assert second == f"DistError: rank 0 failed: {first}"
    assert not (tmp_path / "export").exists()


# --- choice and plan --------------------------------------------------------------------------------------------------


def backend_names(dist: Dist) -> tuple[str, str]:
    try:
        refused = make_backend(config("pytorch"), dist).name
    except DistError as error:
        refused = str(error)
    return make_backend(config("auto"), dist).name, refused


def test_auto_is_pytorch_alone_and_fsdp_with_several_and_pytorch_refuses_several():
    assert make_backend(config("auto"), ALONE).name == "pytorch"
    auto, refused = run_ranks(backend_names, 2)[0]
    assert auto == "fsdp"
    assert refused.startswith("target.train_backend=pytorch is for one process, and 2 ranks are running")


@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
def test_every_backend_works_in_one_process_without_torchrun(backend):
    ((_, expected),) = loss_and_grads(ALONE, config("pytorch"), tiny_shape(), [1])
    try:
        ((_, got),) = loss_and_grads(ALONE, config(backend), tiny_shape(), [2])
    finally:
        stop_dist()
    assert_same_grads(got, expected, 1e-6)


def plan(dist: Dist, cfg: Config) -> str:
    backend = make_backend(cfg, dist)
    backend.prepare(build_model(cfg, tiny_shape()))
    return backend.describe()


def test_the_plan_names_groups_dtypes_and_bytes():
    text = run_ranks(plan, 2, config("fsdp", precision="bf16"))[0]
    lines = text.splitlines()
    assert lines[:3] == [
        "fsdp FULL_SHARD, 2 rank(s): 18,784 parameters, products in bf16, gradients summed in fp32",
        "  model.layers.*: 2 groups of 7,760 parameters, freed after forward",
        "  root: a group of 3,264 parameters, kept after forward",
    ]
    assert lines[3].startswith("this rank: 9,")
    assert lines[3].endswith("gathered at once 0.0 MiB")


# --- dist -------------------------------------------------------------------------------------------------------------


def failing_rank0(dist: Dist) -> tuple[str, list[int]]:
    ran: list[int] = []
    try:
        rank0_first(dist, lambda: ran.append(dist.rank) or 1 // dist.rank)
    except (ZeroDivisionError, DistError) as error:
        return str(error), ran
    return "", ran


def test_rank0_fails_first_and_the_others_do_not_start():
    first, second = run_ranks(failing_rank0, 2)
    assert first == ("integer division or modulo by zero", [0])
    assert second == ("rank 0 failed: ZeroDivisionError: integer division or modulo by zero", [])


def flags_and_sums(dist: Dist) -> list[Any]:
    board = FlagBoard(dist, 2)
    seen = []
    for step in range(3):
        board.post([int(dist.rank == 1 and step == 0), 5 if dist.is_main and step == 2 else 0])
        seen.append(board.read())
    barrier(dist)
    summed = sum_over_ranks(torch.tensor([1, dist.rank]), dist)
    return [*seen, board.read(keep=0), summed.tolist(), on_rank0(dist, lambda: dist.rank)]


def test_flags_of_any_rank_are_read_by_all_one_post_later():
    expected = [(0, 0), (1, 0), (0, 0), (0, 5), [2, 1], 0]
    assert run_ranks(flags_and_sums, 2) == [expected, expected]


def test_flags_alone_come_one_post_later_too():
    board = FlagBoard(ALONE, 1)
    board.post([7])
    assert board.read() == (0,)
    board.post([0])
    assert (board.read(), board.read(keep=0)) == ((7,), (0,))


def test_ranks_from_an_incomplete_environment_are_refused():
    assert read_ranks({}) == (0, 0, 1)
    assert read_ranks({"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}) == (3, 1, 4)
    with pytest.raises(DistError, match="LOCAL_RANK, WORLD_SIZE not set though RANK=0"):
        read_ranks({"RANK": "0"})
    with pytest.raises(DistError, match="RANK=a, LOCAL_RANK=0, WORLD_SIZE=2 are not three numbers"):
        read_ranks({"RANK": "a", "LOCAL_RANK": "0", "WORLD_SIZE": "2"})
