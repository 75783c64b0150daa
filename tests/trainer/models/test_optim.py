"""Schedules equal those of transformers; matrices decay and vectors do not; AdamW can skip a step on the device."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.ranks import run_ranks
from trainer.config.train import warmup_steps
from trainer.optim.build import build_optimizer
from trainer.optim.schedules import lr_multiplier, wsd_decay_steps
from trainer.schema import OptimConfig
from trainer.train.step import apply_update

STEPS = 100


def ours(**fields) -> list[float]:
    multiplier = lr_multiplier(OptimConfig(learning_rate=1.0, **fields), STEPS)
    return [multiplier(step) for step in range(STEPS + 1)]


def test_wsd_without_decay_steps_decays_over_a_fifth():
    assert wsd_decay_steps(OptimConfig(schedule="wsd"), 200) == 40


def test_linear_ends_at_the_minimum():
    got = ours(schedule="linear", warmup_steps=0, min_learning_rate=0.25)
    assert (got[0], got[50], got[100]) == pytest.approx((1.0, 0.625, 0.25))


def test_vectors_do_not_decay():
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    decayed, plain = build_optimizer(model, OptimConfig(learning_rate=1e-3, weight_decay=0.3)).param_groups
    assert (decayed["weight_decay"], [tuple(p.shape) for p in decayed["params"]]) == (0.3, [(2, 3)])
    assert (plain["weight_decay"], [tuple(p.shape) for p in plain["params"]]) == (0.0, [(2,), (2,), (2,)])


def test_adamw_takes_learning_rate_betas_and_eps():
    config = OptimConfig(learning_rate=0.5, beta1=0.6, beta2=0.7, eps=0.25, weight_decay=0.0)
    ours, theirs = nn.Linear(3, 2), nn.Linear(3, 2)
    theirs.load_state_dict(ours.state_dict())
    expected = torch.optim.AdamW(theirs.parameters(), lr=0.5, betas=(0.6, 0.7), eps=0.25, weight_decay=0.0)
    for model, optimizer in ((ours, build_optimizer(ours, config)), (theirs, expected)):
        for factor in (1.0, -3.0):
            optimizer.zero_grad()
            (factor * model(torch.ones(1, 3)).sum()).backward()
            optimizer.step()
    torch.testing.assert_close(ours.weight, theirs.weight, atol=1e-6, rtol=0)


def test_found_inf_leaves_weights_and_moments_as_they_were():
    model = nn.Linear(3, 2)
    optimizer = build_optimizer(model, OptimConfig(learning_rate=1e-3))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    before = [t.clone() for t in (model.weight, optimizer.state[model.weight]["exp_avg"])]
    model.weight.grad.fill_(float("nan"))
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    after = [model.weight, optimizer.state[model.weight]["exp_avg"]]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_what_an_update_reads_is_on_the_cpu_where_any_parameter_is_there():
    seen = []

    class Told(torch.optim.SGD):
        def step(self):
            seen.extend([self.found_inf.device.type, self.grad_scale.device.type])

    groups = [{"params": [nn.Parameter(torch.ones(2, device=device))]} for device in ("meta", "cpu")]
    apply_update(Told(groups), 0.1, torch.tensor(True), divisor=torch.ones(()))
    assert seen == ["cpu", "cpu"]


def take_steps(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        (model(torch.ones(1, 3)).sum() - step).square().backward()
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + step)
        optimizer.step()


class OverShards(TorchDispatchMode):
    """The operations that are called with sharded tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            self.names.add(str(func))
        return func(*args, **(kwargs or {}))


def count_specs() -> int:
    """How many of torch's descriptions of sharded tensors there are."""
    gc.collect()
    return sum("DTensorSpec" in type(thing).__name__ for thing in gc.get_objects())


def step_sharded(dist, whole: dict) -> tuple[dict, bool, set[str], int]:
    """The weights after eight steps, whether the state is sharded, what a further step calls with sharded tensors, and
    how many descriptions the last five steps left."""
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    model.load_state_dict(whole)
    fully_shard(model)
    optimizer = build_optimizer(model, OptimConfig(learning_rate=1e-3))
    take_steps(model, optimizer, range(3))
    before = count_specs()
    take_steps(model, optimizer, range(3, 8))
    left = count_specs() - before
    is_sharded = all(isinstance(optimizer.state[p]["exp_avg"], DTensor) for p in model.parameters())
    weights = {name: p.full_tensor() for name, p in model.state_dict().items()}
    with OverShards() as over_shards:
        optimizer.step()
    return weights, is_sharded, over_shards.names, left


def test_step_over_shards_is_that_over_whole_tensors_and_leaves_nothing_behind():
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    groups = [
        {"params": [p for p in model.parameters() if p.ndim == dim], "weight_decay": decay}
        for dim, decay in ((2, OptimConfig().weight_decay), (1, 0.0))
    ]
    take_steps(model, torch.optim.AdamW(groups, betas=(0.9, 0.95), foreach=False), range(8))
    for weights, is_sharded, over_shards, left in run_ranks(step_sharded, 2, whole):
        torch.testing.assert_close(weights, dict(model.state_dict()), atol=1e-6, rtol=1e-5)
        assert is_sharded
        assert over_shards == set()
        assert left == 0  # torch 2.13 leaves nothing without this either


@pytest.mark.parametrize(("given", "steps", "warmup"), [(None, 200, 10), (None, 6, 1), (None, 3, 0), (7, 6, 7)])
def test_warm_up_is_as_given_else_ten_steps_and_at_most_a_fifth_of_the_run(given, steps, warmup):
    assert warmup_steps(OptimConfig(warmup_steps=given), steps) == warmup
