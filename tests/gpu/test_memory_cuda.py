"""The memory estimate against what CUDA's allocator handed out at the peak of a step, in six usual settings."""

from __future__ import annotations

import gc
import json
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tests.support.tiny import packed_batch
from trainer.config.load import config_from_dict
from trainer.dist import start_dist, stop_dist
from trainer.memory.activations import Kernels
from trainer.memory.estimate import PARTS, MemoryEstimate, estimate_memory
from trainer.models.attention import fastest_kernels
from trainer.models.build import build_model
from trainer.models.families.decoder_shape import DecoderShape
from trainer.models.losses import sft_loss
from trainer.optim.build import build_optimizer
from trainer.parallel.choose import make_backend
from trainer.schema import Config
from trainer.tensors import local_tensor
from trainer.words import GIB

LENGTH = 2048
SMALL = DecoderShape("qwen2", 151936, 896, 4864, 24, 14, 2, 64)
MIDDLE = DecoderShape("qwen2", 151936, 1536, 8960, 28, 12, 2, 128)
LARGE = DecoderShape("qwen2", 152064, 3584, 18944, 28, 28, 4, 128, tie_embeddings=False)


@dataclass(frozen=True)
class Setting:
    shape: DecoderShape
    backend: str
    rows: int
    packed: bool = False
    parallel: dict[str, Any] = field(default_factory=dict)
    lora: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> Config:
        return config_from_dict(
            {
                "target": {"train_backend": self.backend},
                "data": {"seq_len": LENGTH, "packing": self.packed},
                "optim": {"learning_rate": 1e-3},
                "train": {"micro_batch_size": self.rows, "precision": "bf16"},
                "parallel": self.parallel,
                "lora": self.lora,
            }
        )

    @property
    def documents(self) -> list[list[int]]:
        return [[256, 1024, 512, 256]] * self.rows if self.packed else [[LENGTH]] * self.rows


SETTINGS = {
    "0.5B": Setting(SMALL, "pytorch", 8),
    "1.5B packed": Setting(MIDDLE, "pytorch", 4, packed=True),
    "1.5B sharded, packed": Setting(MIDDLE, "fsdp", 4, packed=True),
    "1.5B sharded, half kept": Setting(MIDDLE, "fsdp", 8, parallel={"activation_checkpointing": "budget"}),
    "1.5B eager, selective": Setting(
        MIDDLE, "fsdp", 4, parallel={"activation_checkpointing": "selective", "compile": False}
    ),
    "7B LoRA": Setting(LARGE, "pytorch", 4, lora={"rank": 16}),
}


def peak_bytes(setting: Setting) -> tuple[int, MemoryEstimate]:
    """Allocated at the highest point of the third step, and what was estimated."""
    config, dist = setting.config, start_dist("cuda")
    backend = make_backend(config, dist)
    module = backend.prepare(build_model(config, setting.shape))
    for parameter in module.parameters():
        local_tensor(parameter).data.normal_(0, 0.02)
    optimizer = build_optimizer(module, config.optim)
    batch = packed_batch(setting.documents, length=LENGTH, vocab_size=setting.shape.vocab_size).to(dist.device)
    with fastest_kernels():
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            sft_loss(module, batch, packed=config.data.packing).total.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    kernels = Kernels.on(dist.device, config.parallel)
    return torch.cuda.max_memory_allocated(), estimate_memory(setting.shape, config, world_size=1, kernels=kernels)


@pytest.mark.parametrize("name", SETTINGS)
def test_estimate_is_the_peak_within_10_percent(name):
    try:
        measured, estimate = peak_bytes(SETTINGS[name])
    finally:
        stop_dist()
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
    parts = {part: round(getattr(estimate, part) / GIB, 2) for part in PARTS}
    told = {"estimate_gib": round(estimate.total / GIB, 2), "measured_gib": round(measured / GIB, 2)}
    print(json.dumps({"setting": name, **told, "ratio": round(estimate.total / measured, 3), **parts}))
    assert estimate.total == pytest.approx(measured, rel=0.10)
