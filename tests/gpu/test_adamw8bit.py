"""torchao's 8-bit AdamW on CUDA, where it is compiled: its steps, a step taken back on the device, its memory."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from trainer.optim.build import build_optimizer
from trainer.schema import OptimConfig
from trainer.step import apply_update

CONFIGS = {word: OptimConfig(optimizer=word) for word in ("adamw", "adamw8bit")}


def model(width: int = 1024, layers: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))).cuda()


def give_grads(module: nn.Module, seed: int) -> None:
    generator = torch.Generator("cuda").manual_seed(seed)
    for parameter in module.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator, device="cuda")


def flag(value: bool) -> Tensor:
    return torch.tensor(value, device="cuda")


def stored(module: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    yield from (p.detach().clone() for p in module.parameters())
    for tensor in (t for state in optimizer.state.values() for t in state.values()):
        yield from (part.clone() for part in ([tensor.codes, tensor.scale] if hasattr(tensor, "codes") else [tensor]))


def test_steps_are_near_those_of_fp32_state():
    results = []
    for config in CONFIGS.values():
        module = model()
        optimizer = build_optimizer(module, config)
        for seed in range(5):
            give_grads(module, seed)
            apply_update(optimizer, 1e-3, flag(True))
        results.append(module[0].weight.detach())
    moved = (results[0] - model()[0].weight).abs().mean()
    assert (results[1] - results[0]).abs().mean() < 0.05 * moved


def test_step_that_is_not_finite_changes_no_bit_and_nobody_waits():
    module = model()
    optimizer = build_optimizer(module, CONFIGS["adamw8bit"])
    for seed in range(2):
        give_grads(module, seed)
        apply_update(optimizer, 1e-3, flag(True))
    before = list(stored(module, optimizer))
    finite = flag(False)
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, float("nan"))
    torch.cuda.set_sync_debug_mode("error")
    try:
        apply_update(optimizer, 1e-3, finite)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(map(torch.equal, stored(module, optimizer), before))


@pytest.mark.parametrize("word", CONFIGS)
def test_state_takes_its_bytes(word):
    module = model(4096, 8)
    give_grads(module, 0)
    optimizer = build_optimizer(module, CONFIGS[word])
    apply_update(optimizer, 1e-3, flag(True))  # compiles
    params = sum(p.numel() for p in module.parameters())
    state = sum(t.numel() * t.element_size() for t in list(stored(module, optimizer))) / params - 4
    give_grads(module, 1)
    torch.cuda.synchronize()
    began = time.perf_counter()
    apply_update(optimizer, 1e-3, flag(True))
    torch.cuda.synchronize()
    print(
        f"{word}: {state:.3f} bytes of state a parameter, {params:,} parameters in {time.perf_counter() - began:.4f} s"
    )
    assert state == pytest.approx(8.0 if word == "adamw" else 2.0625, rel=0.01)
