"""The memory estimate against bytes that torch really holds, and against what it says would save some."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.configs import config_of
from tests.support.ranks import run_ranks
from tests.support.tiny import packed_batch, saved_bytes, tiny_shape
from trainer.config.load import config_from_dict
from trainer.data.batches.steps import micro_batches
from trainer.dist import Dist
from trainer.memory.estimate import MemoryEstimate, estimate_memory, savings
from trainer.models.families.decoder import Decoder
from trainer.models.families.decoder_shape import DecoderShape
from trainer.models.hf import init_random
from trainer.models.losses import sft_loss
from trainer.optim.build import build_optimizer
from trainer.parallel.choose import make_backend
from trainer.schema import Config
from trainer.tensors import local_tensor
from trainer.words import GIB, render_bytes

ROWS, LENGTH = 3, 64
HYBRID = {"sharding_strategy": "HYBRID_SHARD", "dp_replicate": 2}


def sized(*, train: dict[str, Any] | None = None, **sections: dict[str, Any]) -> Config:
    """A config whose micro-batch has ROWS of LENGTH."""
    data = {"seq_len": LENGTH, **sections.pop("data", {})}
    return config_of(data=data, train={"micro_batch_size": ROWS, **(train or {})}, **sections)


# --- what stays -------------------------------------------------------------------------------------------------------


def static_bytes(dist: Dist, backend: str) -> list[int]:
    """Bytes of parameters, gradients and optimizer state that this rank holds after a step."""
    config = sized(target={"train_backend": backend, "gpu_ranks": list(range(dist.world_size))})
    with torch.device("meta"):
        decoder = Decoder(tiny_shape(vocab_size=103))
    prepared = make_backend(config, dist)
    module = prepared.prepare(decoder)
    init_random(module, 0)
    optimizer = build_optimizer(module, replace(config.optim, learning_rate=1e-3))
    batch = packed_batch([[40, 20], [64], [30]], length=LENGTH)
    sft_loss(module, batch).total.backward()
    optimizer.step()
    tensors = [list(module.parameters()), [p.grad for p in module.parameters()]]
    tensors.append([s for state in optimizer.state.values() for s in state.values() if s.numel() > 1 or s.dim() > 0])
    return [sum(4 * local_tensor(tensor).numel() for tensor in group) for group in tensors]


@pytest.mark.parametrize(("backend", "world_size"), [("fsdp", 1), ("fsdp", 2), ("fsdp", 3), ("ddp", 2)])
def test_parameters_gradients_and_optimizer_state_are_exact_on_the_fullest_rank(backend, world_size):
    config = sized(target={"train_backend": backend, "gpu_ranks": list(range(world_size))})
    held = run_ranks(static_bytes, world_size, backend)
    estimate = estimate_memory(tiny_shape(vocab_size=103), config, world_size=world_size)
    fullest = [max(kind) for kind in zip(*held, strict=True)]
    assert [estimate.parameters, estimate.gradients, estimate.optimizer] == fullest


def test_gradients_that_wait_for_the_last_micro_batch_under_fsdp_are_whole():
    config = sized(target={"train_backend": "fsdp"}, train={"grad_accum_steps": 2})
    once = replace(config, train=replace(config.train, grad_accum_steps=1))
    shape = tiny_shape()
    whole, shards = (estimate_memory(shape, values, world_size=4).gradients for values in (config, once))
    assert (whole, shards) == (4 * shape.num_params, estimate_memory(shape, once, world_size=4).parameters)
    every = replace(config, parallel=replace(config.parallel, reduce_every_micro_batch=True))
    assert estimate_memory(shape, every, world_size=4).gradients == shards


@pytest.mark.parametrize(("total", "world_size", "forwards"), [(None, 2, 1), (12, 2, 2), (13, 2, 3), (3, 4, 1)])
def test_forwards_of_a_step_follow_from_the_global_batch(total, world_size, forwards):
    assert micro_batches(sized(train={"global_batch_size": total}), world_size) == forwards


def test_adapters_alone_have_gradients_and_state_and_the_base_is_stored_in_bf16():
    estimate = estimate_memory(tiny_shape(), sized(lora={"rank": 2}, train={"precision": "bf16"}), world_size=1)
    # per block 2 rows and columns for q (32 + 32), k and v (32 + 16), o (32 + 32), gate, up and down (32 + 48)
    adapters = 2 * 2 * (64 + 2 * 48 + 64 + 3 * 80)
    assert (estimate.gradients, estimate.optimizer) == (4 * adapters, 8 * adapters)
    assert estimate.parameters == 2 * tiny_shape().num_params + 4 * adapters


def test_offloaded_run_holds_no_parameters_and_no_state_on_the_device():
    config = sized(target={"train_backend": "fsdp"}, parallel={"cpu_offload": True})
    estimate = estimate_memory(tiny_shape(), config, world_size=1)
    assert (estimate.parameters, estimate.gradients, estimate.optimizer) == (0, 0, 0)
    assert estimate.offloaded == 16 * tiny_shape().num_params


def test_8_bit_state_of_large_matrices_takes_a_quarter():
    shape = tiny_shape(hidden_size=128, intermediate_size=128, vocab_size=1024, head_dim=32)
    whole, low = (
        estimate_memory(shape, sized(optim={"optimizer": name, **more}), world_size=1).optimizer
        for name, more in (("adamw", {}), ("adamw8bit", {"embeddings_8bit": True}))
    )
    assert 0.25 < low / whole < 0.27


# --- activations ------------------------------------------------------------------------------------------------------


def saved_of(config: Config, **shape: Any) -> int:
    return saved_bytes(config, tiny_shape(**shape), packed_batch([[40, 20], [64], [30]], length=LENGTH))


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_activations_are_what_autograd_saves_within_10_percent(family, packing, precision):
    config = sized(data={"packing": packing}, train={"precision": precision})
    shape = {"family": family, "num_layers": 4, "hidden_size": 48, "head_dim": 12, "intermediate_size": 80}
    estimate = estimate_memory(tiny_shape(**shape), config, world_size=1)
    assert estimate.activations == pytest.approx(saved_of(config, **shape), rel=0.1)


@pytest.mark.parametrize(
    "part",
    [
        {"lora": {"rank": 4}},
        {"lora": {"rank": 4, "dropout": 0.1}},
        {"lora": {"rank": 4, "targets": ["q_proj", "v_proj"]}},
        {"model": {"freeze": ["model.embed_tokens.*", "model.layers.[01].*"]}},
    ],
    ids=["lora", "dropout", "q and v", "lower blocks frozen"],
)
def test_activations_of_what_trains_in_part_are_within_10_percent(part):
    config, shape = sized(**part), {"num_layers": 4, "hidden_size": 48}
    estimate = estimate_memory(tiny_shape(**shape), config, world_size=1)
    assert estimate.activations == pytest.approx(saved_of(config, **shape), rel=0.1)


@pytest.mark.parametrize(
    "parallel",
    [{"activation_checkpointing": "full"}, {"activation_checkpointing": "full", "checkpoint_every": 3}],
    ids=["full", "every-third"],
)
def test_recomputed_activations_are_what_autograd_keeps_of_the_block(parallel):
    config, shape = sized(parallel=parallel), {"num_layers": 12, "hidden_size": 48}
    estimate = estimate_memory(tiny_shape(**shape), config, world_size=1)
    assert estimate.activations == pytest.approx(saved_of(config, **shape), rel=0.1)


def test_block_that_is_computed_again_is_there_in_its_backward_pass():
    shape = tiny_shape(num_layers=2, hidden_size=256, intermediate_size=768, vocab_size=8)
    again, never = (
        estimate_memory(shape, sized(parallel={"activation_checkpointing": mode}), world_size=1)
        for mode in ("full", "none")
    )
    block = (never.activations - again.activations) / 2
    assert again.temporary - never.temporary == pytest.approx(block, rel=0.01)


def test_keeping_products_lies_between_keeping_all_and_inputs_alone():
    full, selective, none = (
        estimate_memory(
            tiny_shape(num_layers=12), sized(parallel={"activation_checkpointing": mode}), world_size=1
        ).activations
        for mode in ("full", "selective", "none")
    )
    assert full < selective < none


def test_two_replicas_of_two_shards_hold_what_two_ranks_hold():
    hybrid = sized(target={"train_backend": "fsdp", "gpu_ranks": [0, 1, 2, 3]}, parallel=HYBRID)
    estimate = estimate_memory(tiny_shape(), hybrid, world_size=4)
    assert estimate.parameters == estimate_memory(tiny_shape(), sized(), world_size=2).parameters


# --- against measured peaks -------------------------------------------------------------------------------------------

WIDE = DecoderShape("qwen2", 152064, 3584, 18944, 28, 28, 4, 128, tie_embeddings=False)
MEASURED: dict[str, tuple[DecoderShape, int, int, dict[str, Any], float]] = {
    "2 rows": (WIDE, 4, 2, {}, 62.6),
    "4 rows, nothing kept": (WIDE, 4, 4, {"activation_checkpointing": "budget", "activation_budget": 0.0}, 34.2),
    "4 rows, recomputed": (WIDE, 4, 4, {"activation_checkpointing": "full"}, 34.0),
    "2 ranks, half kept": (WIDE, 2, 1, {"activation_checkpointing": "budget"}, 59.9),
    "half the layers": (replace(WIDE, num_layers=14), 2, 2, {}, 47.8),
    "half the layers, half kept": (replace(WIDE, num_layers=14), 2, 4, {"activation_checkpointing": "budget"}, 48.0),
}
"""A model, ranks, rows of 4096 tokens, options, and the GiB that a plain FSDP2 program with the same compiled blocks
took at its peak on H100 or H200 (torch 2.11, 2026-11-27); its head's gradient is bf16, ours fp32."""


@pytest.mark.parametrize("case", MEASURED)
def test_estimate_is_within_8_percent_of_the_peak_of_a_plain_program(case):
    shape, ranks, rows, parallel, peak_gib = MEASURED[case]
    config = config_from_dict(
        {
            "target": {"gpu_ranks": list(range(ranks)), "train_backend": "fsdp"},
            "data": {"seq_len": 4096, "packing": False},
            "train": {"micro_batch_size": rows, "precision": "bf16"},
            "parallel": parallel,
        }
    )
    assert estimate_memory(shape, config, world_size=ranks).total / GIB == pytest.approx(peak_gib, rel=0.08)


# --- what would save some ---------------------------------------------------------------------------------------------


def test_savings_are_the_difference_to_the_estimate_with_the_change_made():
    config = sized(target={"train_backend": "pytorch"})
    shape, now = tiny_shape(), estimate_memory(tiny_shape(), config, world_size=1).total
    found = {saving.change: saving.size for saving in savings(shape, config, world_size=1)}
    assert list(found.values()) == sorted(found.values(), reverse=True)
    changed = sized(target={"train_backend": "pytorch"}, data={"seq_len": 32})
    assert found["data.seq_len=32"] == now - estimate_memory(shape, changed, world_size=1).total
    assert found["parallel.activation_checkpointing=full"] > 0


def test_savings_name_only_what_is_not_in_use_yet():
    config = sized(parallel={"activation_checkpointing": "full"}, train={"micro_batch_size": 1})
    changes = " ".join(saving.change for saving in savings(tiny_shape(), config, world_size=1))
    assert "activation_checkpointing" not in changes
    assert "micro_batch_size" not in changes


@pytest.mark.parametrize(
    ("backend", "change"), [("fsdp", "target.gpu_ranks=auto:4"), ("ddp", "target.train_backend=fsdp")]
)
def test_more_gpus_are_offered_to_a_run_that_is_sharded_already(backend, change):
    config = sized(target={"train_backend": backend, "gpu_ranks": [0, 1]})
    changes = [saving.change for saving in savings(tiny_shape(), config, world_size=2)]
    assert [text for text in changes if text.startswith("target.")] == [change]


@pytest.mark.parametrize(
    ("accumulates", "total"), [(False, 1 + 2 + 4 + 50 + 60 + 7), (True, 1 + 3 + 2 + 4 + 50 + 60 + 7)]
)
def test_gradients_and_activations_are_there_together_only_with_several_forwards(accumulates, total):
    assert MemoryEstimate(1, 3, 2, 4, 50, 60, 7, accumulates=accumulates).total == total


def test_table_has_every_kind_and_the_total():
    lines = estimate_memory(tiny_shape(), sized(), world_size=1).render()
    assert [line.split()[0] for line in lines][-2:] == ["communication", "at"]
    assert (render_bytes(3 * 2**29), render_bytes(2**20)) == ("1.50 GiB", "1.00 MiB")
