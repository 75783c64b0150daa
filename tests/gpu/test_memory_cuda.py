"""The memory estimate against what CUDA's allocator handed out at the peak of a step."""

from __future__ import annotations

import gc

import pytest
import torch

from tests.tiny import packed_batch
from trainer.config.load import config_from_dict
from trainer.dist import start_dist, stop_dist
from trainer.inspection.memory import estimate_memory
from trainer.losses import sft_loss
from trainer.models.build import build_decoder, fill_weights
from trainer.models.decoder import DecoderShape
from trainer.optim.build import build_optimizer
from trainer.parallel.choose import make_backend
from trainer.words import GIB

LENGTH, ROWS = 1024, 4
SHAPE = DecoderShape(
    family="qwen2",
    vocab_size=50000,
    hidden_size=1024,
    intermediate_size=3072,
    num_layers=12,
    num_heads=16,
    num_kv_heads=4,
    head_dim=64,
)


def peak_bytes(values: dict) -> int:
    """Allocated at the highest point of the second step."""
    config, dist = config_from_dict(values), start_dist("cuda")
    backend = make_backend(config, dist)
    module = backend.prepare(build_decoder(config, SHAPE))
    fill_weights(config, module, None)
    optimizer = build_optimizer(module, config.optim)
    batch = packed_batch([[LENGTH // 2, LENGTH // 2]] * ROWS, length=LENGTH, vocab_size=SHAPE.vocab_size)
    batch = batch.to(dist.device)
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        sft_loss(module, batch, packed=config.data.packing).total.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return torch.cuda.max_memory_allocated()


@pytest.mark.parametrize(
    "changes",
    [
        {"target": {"train_backend": "pytorch"}},
        {"target": {"train_backend": "fsdp"}},
        {"target": {"train_backend": "fsdp"}, "parallel": {"activation_checkpointing": "full"}},
        {"target": {"train_backend": "fsdp"}, "parallel": {"activation_checkpointing": "selective"}},
        {"target": {"train_backend": "pytorch"}, "lora": {"rank": 16}},
    ],
    ids=["pytorch", "fsdp", "full", "selective", "lora"],
)
def test_estimate_is_the_peak_within_10_percent(changes):
    values = {"data": {"seq_len": LENGTH}, "train": {"micro_batch_size": ROWS}, **changes}
    try:
        measured = peak_bytes(values)
    finally:
        stop_dist()
        gc.collect()
        torch.cuda.empty_cache()
    estimate = estimate_memory(SHAPE, config_from_dict(values), world_size=1)
    print(f"measured {measured / GIB:.2f} GiB, estimated {estimate.total / GIB:.2f} GiB", *estimate.render(), sep="\n")
    assert estimate.total == pytest.approx(measured, rel=0.10)
