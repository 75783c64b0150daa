"""Clipping, schedules and the optimizer, compared with torch's on whole tensors and transformers' schedules."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import optimization as hf

from tests.oracles.measure import Oracle, largest_difference, scaled_difference, series_difference, worst
from tests.support.ranks import run_ranks
from tests.support.tiny import ALONE, tiny_shape
from trainer.dist import Dist
from trainer.models.build import build_model
from trainer.models.hf import gather_full, init_random, named_weights
from trainer.optim.build import build_optimizer
from trainer.optim.schedules import lr_multiplier
from trainer.parallel.backend import Backend
from trainer.parallel.choose import make_backend
from trainer.schema import Config, OptimConfig, TargetConfig, TrainConfig
from trainer.tensors import local_tensor, own_slices
from trainer.train.step import clip_divisor

Fields = dict[str, Any]
STEPS = 100
OPTIM = OptimConfig(learning_rate=1e-2, weight_decay=0.1)


def prepared(dist: Dist, backend: str) -> tuple[Backend, nn.Module]:
    config = Config(target=TargetConfig(train_backend=backend), train=TrainConfig(precision="fp32"))
    made = make_backend(config, dist)
    module = made.prepare(build_model(config, tiny_shape()))
    init_random(module, 0)
    return made, module


def random_grads(module: nn.Module, seed: int) -> dict[str, Tensor]:
    """A whole gradient for every parameter, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(p.shape, generator=generator) for name, p in named_weights(module)}


def give_grads(module: nn.Module, grads: dict[str, Tensor]) -> None:
    """Every parameter its gradient, or this rank's share of it."""
    for name, parameter in named_weights(module):
        parameter.grad = torch.zeros_like(parameter)
        local_tensor(parameter.grad).copy_(grads[name][own_slices(parameter)])


# --- clipping ---------------------------------------------------------------------------------------------------------


def clipped(dist: Dist, backend: str) -> tuple[Tensor, dict[str, Tensor] | None]:
    """The norm, and the gradients after they were clipped to 0.5."""
    made, module = prepared(dist, backend)
    give_grads(module, random_grads(module, 7))
    norm = made.grad_norm()
    made.scale_grads(1.0 / clip_divisor(norm, 0.5))
    for parameter in module.parameters():
        local_tensor(parameter).data.copy_(local_tensor(parameter.grad))
    return norm, gather_full(module, dist)


def clip_difference(folder: Path, *, backend: str, ranks: int) -> float:
    grads = random_grads(prepared(ALONE, "pytorch")[1], 7)
    whole = {name: nn.Parameter(torch.zeros_like(grad)) for name, grad in grads.items()}
    for name, parameter in whole.items():
        parameter.grad = grads[name].clone()
    expected = torch.nn.utils.clip_grad_norm_(whole.values(), 0.5)
    results = run_ranks(clipped, ranks, backend)
    differences = [largest_difference(norm / expected, torch.ones(())) for norm, _ in results]
    after = scaled_difference(results[0][1], {name: parameter.grad for name, parameter in whole.items()})
    return worst([*differences, after])


# --- schedules --------------------------------------------------------------------------------------------------------


def schedule_difference(
    folder: Path, *, make: Callable[..., Any], theirs: dict[str, Any], ours: dict[str, Any]
) -> float:
    schedule = make(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0), **theirs)
    multiplier = lr_multiplier(OptimConfig(learning_rate=1.0, **ours), STEPS)
    steps = range(STEPS + 1)
    return series_difference(map(multiplier, steps), map(schedule.lr_lambdas[0], steps))


def _schedule(name: str, make: Callable[..., Any], warmup: int, *, inputs: str = "", **fields: Any) -> Oracle:
    """A schedule of 100 steps; `fields` are ours, those of transformers are made of them."""
    theirs: Fields = {"num_warmup_steps": warmup}
    if name != "constant":
        theirs["num_training_steps"] = STEPS
    if name == "wsd":
        theirs |= {"num_decay_steps": fields["decay_steps"], "min_lr_ratio": fields["min_learning_rate"]}
    elif "min_learning_rate" in fields:
        theirs["min_lr"] = fields["min_learning_rate"]
    ours = {"schedule": name, "warmup_steps": warmup, **fields}
    return Oracle(
        f"learning rate, {name}",
        f"transformers {make.__name__}",
        f"{STEPS} steps, warm-up of {warmup}{inputs}",
        1e-12,
        partial(schedule_difference, make=make, theirs=theirs, ours=ours),
    )


SCHEDULES = [
    *(_schedule("cosine", hf.get_cosine_schedule_with_warmup, warmup) for warmup in (0, 1, 10)),
    *(_schedule("linear", hf.get_linear_schedule_with_warmup, warmup) for warmup in (0, 1, 10)),
    _schedule("constant", hf.get_constant_schedule_with_warmup, 7),
    _schedule(
        "cosine",
        hf.get_cosine_with_min_lr_schedule_with_warmup,
        5,
        inputs=", minimum of 0.1",
        min_learning_rate=0.1,
    ),
    *(
        _schedule(
            "wsd",
            hf.get_wsd_schedule,
            8,
            inputs=f", decay over {decay}, minimum of {floor}",
            decay_steps=decay,
            min_learning_rate=floor,
        )
        for decay, floor in ((20, 0.0), (35, 0.1))
    ),
]


# --- the optimizer ----------------------------------------------------------------------------------------------------


def stepped(dist: Dist, backend: str) -> dict[str, Tensor] | None:
    """All weights after ten steps on given gradients."""
    _, module = prepared(dist, backend)
    optimizer = build_optimizer(module, OPTIM)
    for step in range(10):
        give_grads(module, random_grads(module, step))
        optimizer.step()
    return gather_full(module, dist)


def optimizer_difference(folder: Path, *, backend: str, ranks: int) -> float:
    module = prepared(ALONE, "pytorch")[1]
    matrices = [parameter for parameter in module.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in module.parameters() if parameter.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, foreach=False, fused=False)
    for step in range(10):
        give_grads(module, random_grads(module, step))
        optimizer.step()
    got = run_ranks(stepped, ranks, backend)[0]
    return worst(largest_difference(got[name], parameter.detach()) for name, parameter in named_weights(module))


SPREADS = (("ddp", 2), ("fsdp", 2), ("fsdp", 3))
ORACLES = [
    *(
        Oracle(
            "clipped gradients and their norm, relative",
            "torch clip_grad_norm_ on whole gradients",
            f"{backend}, {ranks} ranks",
            1e-6,
            partial(clip_difference, backend=backend, ranks=ranks),
        )
        for backend, ranks in SPREADS
    ),
    *SCHEDULES,
    *(
        Oracle(
            "weights after AdamW",
            "torch AdamW, not fused, on whole weights",
            f"{backend}, {ranks} ranks, 10 steps, matrices alone decay",
            1e-6,
            partial(optimizer_difference, backend=backend, ranks=ranks),
        )
        for backend, ranks in SPREADS
    ),
]
