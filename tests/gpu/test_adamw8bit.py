"""8-bit AdamW on CUDA: its kernel against torchao's own step, a skipped step, its memory and its time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from tests.support.adamw8bit_check import check_adamw8bit
from trainer.optim.build import build_optimizer
from trainer.schema import OptimConfig
from trainer.train.step import apply_update

CONFIGS = {word: OptimConfig(learning_rate=1e-3, optimizer=word) for word in ("adamw", "adamw8bit")}


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


def test_steps_of_the_kernel_are_those_of_torchao():
    case = check_adamw8bit("cuda")
    print(case)
    assert case["wrong codes"] == 0
    assert case["codes"] <= 1
    assert case["other codes"] < 1e-2
    assert case["parameters"] < 1e-6 < 1e-3 < case["moved"]
    assert (case["divided"], case["skipped"]) == (True, True)


def step_ms(optimizer: torch.optim.Optimizer, module: nn.Module, *, count: int = 20) -> float:
    """The median time of a step on the GPU, the gradients' divisor included; the first two compile."""
    times = []
    divisor, finite = torch.tensor(2.0, device="cuda"), flag(True)
    for seed in range(count + 2):
        give_grads(module, seed)
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        torch.cuda._sleep(20_000_000)  # some 10 ms, in which the host gets ahead
        ends[0].record()
        apply_update(optimizer, 1e-3, finite, divisor=divisor)
        ends[1].record()
        torch.cuda.synchronize()
        times.append(ends[0].elapsed_time(ends[1]))
    return sorted(times[2:])[count // 2]


def test_state_takes_its_bytes():
    for word, expected in (("adamw", 8.0), ("adamw8bit", 2.0625)):
        module = model(4096, 8)
        optimizer = build_optimizer(module, CONFIGS[word])
        took = step_ms(optimizer, module)
        params = sum(p.numel() for p in module.parameters())
        state = sum(t.numel() * t.element_size() for t in list(stored(module, optimizer))) / params - 4
        print(f"{word}: {state:.3f} bytes of state a parameter; {params:,} parameters in {took:.2f} ms")
        assert state == pytest.approx(expected, rel=0.01)
