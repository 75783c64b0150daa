"""Float8 products on CUDA: steps that learn as bf16's do, what is recomputed, no wait, and the time of a block."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from trainer.batch import Batch
from trainer.dist import Dist
from trainer.models.attention import fastest_kernels
from trainer.models.build import build_model, fill_weights
from trainer.models.families.decoder import Decoder
from trainer.models.families.decoder_shape import DecoderShape
from trainer.models.float8 import use_float8
from trainer.models.losses import sft_loss
from trainer.optim.build import build_optimizer
from trainer.parallel.blocks import compile_blocks
from trainer.parallel.choose import make_backend
from trainer.parallel.float8_choice import seconds_of
from trainer.schema import Config, DataConfig, LoraConfig, OptimConfig, ParallelConfig, TargetConfig, TrainConfig
from trainer.train.step import apply_update

DEVICE = torch.device("cuda", 0)
DIST = Dist(0, 0, 1, DEVICE)
SHAPE = DecoderShape("qwen2", 4096, 256, 512, 3, 4, 2, 64)
WIDE = replace(SHAPE, hidden_size=1536, intermediate_size=8960, num_heads=12, head_dim=128)
"""As wide as Qwen2.5-1.5B."""

CASES = {
    "whole": Config(),
    "lora": Config(lora=LoraConfig(rank=8)),
    "selective": Config(parallel=ParallelConfig(activation_checkpointing="selective")),
    "budget": Config(parallel=ParallelConfig(activation_checkpointing="budget", activation_budget=0.5)),
    "fsdp": Config(target=TargetConfig(train_backend="fsdp")),
}


def prepared(config: Config, float8: str) -> torch.nn.Module:
    torch._dynamo.reset()
    train, data = TrainConfig(micro_batch_size=2, precision="bf16", float8=float8), DataConfig(seq_len=512)
    config = replace(config, train=train, data=data)
    backend = make_backend(config, DIST)
    module = backend.prepare(build_model(config, SHAPE))
    fill_weights(config, module, None)
    return module


def batch() -> Batch:
    ids = torch.randint(SHAPE.vocab_size, (2, 512), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(512).expand(2, -1)
    return Batch(ids, ids.roll(-1, 1), positions, torch.zeros_like(ids)).to(DEVICE)


def losses(config: Config, float8: str, *, steps: int = 12) -> list[float]:
    module, rows, found = prepared(config, float8), batch(), []
    optimizer = build_optimizer(module, OptimConfig(learning_rate=1e-3))
    finite, divisor = torch.ones((), device=DEVICE, dtype=torch.bool), torch.tensor(1024.0, device=DEVICE)
    try:
        with fastest_kernels():
            for step in range(steps):
                torch.cuda.set_sync_debug_mode("error" if step > 2 else "default")
                loss = sft_loss(module, rows)
                loss.total.backward()
                apply_update(optimizer, 1e-3, finite, divisor=divisor)
                found.append(loss.total.detach() / 1024)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return torch.stack(found).tolist()


@pytest.mark.parametrize("name", CASES)
def test_steps_in_float8_learn_as_those_in_bf16_do_and_wait_for_nothing(name):
    expected, found = (losses(CASES[name], float8) for float8 in ("off", "on"))
    off = max(abs(a / b - 1) for a, b in zip(found, expected, strict=True))
    print(f"{name}: last loss {expected[-1]:.4f} in bf16, {found[-1]:.4f} in float8; at most {off:.2%} between any two")
    assert found != expected
    assert off < 0.04
    assert found[0] == pytest.approx(expected[0], rel=1e-3)  # the same weights
    assert found[0] - found[-1] > 0.9 * (expected[0] - expected[-1]) > 0  # learns as fast, from a batch seen again


def arrange(blocks: Decoder) -> None:
    blocks.choose_kernels(DEVICE)
    compile_blocks(blocks, fixed_shapes=True)


def arrange_float8(blocks: Decoder) -> None:
    use_float8(blocks)
    arrange(blocks)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=["fp32 parameters", "gathered bf16"])
@pytest.mark.parametrize("hidden", [1536, 4096])
def test_time_of_blocks(stored, hidden):
    shape = WIDE if hidden == 1536 else replace(WIDE, hidden_size=4096, intermediate_size=14336, num_heads=32)
    with torch.device("meta"):
        decoder = Decoder(shape, compute_dtype=torch.bfloat16)
    with fastest_kernels():
        ms = []
        for change in (arrange, arrange_float8):
            torch._dynamo.reset()
            ms.append(1e3 * seconds_of(decoder, change, rows=4, seq_len=2048, device=DEVICE, stored=stored))
    print(f"3 blocks of {hidden}, 4 x 2048, {stored}: {ms[0]:.2f} ms in bf16, {ms[1]:.2f} ms in float8")
    assert min(ms) > 0


def test_auto_says_what_it_has_measured():
    config = Config(
        train=TrainConfig(micro_batch_size=4, precision="bf16", float8="auto"), data=DataConfig(seq_len=2048)
    )
    backend = make_backend(config, DIST)
    with fastest_kernels():
        backend.prepare(build_model(config, WIDE))
    line = backend.describe().splitlines()[-1]
    print(line)
    assert line.startswith("float8: ") and line.endswith((": on", ": off"))
    assert " 0.00 x " not in line  # which a compiler that fails would be taken for
