"""The same rows through any backend on any number of ranks, and the gradients that they give."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.support.tiny import ALONE, packed_batch, rows_of, tiny_shape
from trainer.batch import Batch
from trainer.dist import (
    Dist,
    sum_over_ranks,
)
from trainer.models.build import build_model
from trainer.models.families.decoder_shape import DecoderShape
from trainer.models.hf import init_random, named_weights
from trainer.models.losses import sft_loss
from trainer.parallel.backend import Backend
from trainer.parallel.choose import make_backend
from trainer.schema import Config, OptimConfig, ParallelConfig, TargetConfig, TrainConfig

# 16 rows whose target counts differ widely, so that a mean of means would show
ROWS = [[24], [3, 4], [12, 12], [2], [5, 6, 7], [20], [9], [1], [24], [8, 8], [3], [17, 5], [2, 2, 2], [23], [11], [6]]


def config(backend: str, *, precision: str = "fp32", **parallel: Any) -> Config:
    return Config(
        target=TargetConfig(train_backend=backend),
        optim=OptimConfig(learning_rate=1e-3),
        train=TrainConfig(precision=precision),
        parallel=ParallelConfig(**parallel),
    )


def prepared(dist: Dist, cfg: Config, shape: DecoderShape) -> tuple[Backend, nn.Module]:
    backend = make_backend(cfg, dist)
    module = backend.prepare(build_model(cfg, shape))
    init_random(module, 0)
    return backend, module


def micro_batches(dist: Dist, steps: int) -> list[Batch]:
    batch, rows = packed_batch(ROWS, length=24), len(ROWS) // dist.world_size // steps
    starts = [(dist.rank * steps + step) * rows for step in range(steps)]
    return [rows_of(batch, start, start + rows) for start in starts]


def backward(backend: Backend, module: nn.Module, batches: list[Batch]) -> float:
    total = 0.0
    for number, batch in enumerate(batches):
        backend.sync(number == len(batches) - 1)
        loss = sft_loss(module, batch)
        loss.total.backward()
        total += loss.total.item()
    return total


def full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def full_grads(module: nn.Module) -> dict[str, Tensor]:
    return {name: full(parameter.grad) for name, parameter in named_weights(module)}


def loss_and_grads(dist: Dist, cfg: Config, shape: DecoderShape, steps: Iterable[int]) -> list[tuple[float, dict]]:
    """For each number of micro-batches: the loss over all ranks, and the whole gradients."""
    backend, module = prepared(dist, cfg, shape)
    results = []
    for count in steps:
        module.zero_grad()
        total = backward(backend, module, micro_batches(dist, count))
        results.append((sum_over_ranks(torch.tensor(total), dist).item(), full_grads(module)))
    return results


def grads_of_one() -> dict[str, Tensor]:
    """The gradients of one process without any option."""
    return loss_and_grads(ALONE, config("pytorch"), tiny_shape(), [1])[0][1]


def assert_same_grads(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float) -> None:
    assert got.keys() == want.keys()
    for name, expected in want.items():
        scale = expected.abs().max().item()
        torch.testing.assert_close(
            got[name], expected, atol=tolerance * scale, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
        )
