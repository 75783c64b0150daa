"""One optimizer step: accumulate, normalise, clip, check, update. Nothing in it waits for the device."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from trainer.dist import Dist, sum_over_ranks
from trainer.optim.groups import set_learning_rate
from trainer.run import Run

NAMES = ("loss sum", "target tokens", "tokens", "gradient norm", "finite")
"""The first entries of StepValues.values. After them stand, rank by rank, the seconds that each took to get its data
and through its forward passes, and whether its own loss was not finite (1.0)."""


@dataclass(frozen=True)
class StepValues:
    """What a step has to tell, still on its way from the device: `values` may be read once `ready` says so."""

    step: int
    lr: float
    data_wait_s: float
    values: torch.Tensor  # [5 + 2·ranks] float64 on the CPU, see NAMES
    ready: torch.cuda.Event | None

    def read(self) -> list[float]:
        if self.ready is not None:
            self.ready.synchronize()
        return self.values.tolist()


def train_step(run: Run, step: int, *, lr: float) -> StepValues:
    """One optimizer step over this rank's micro-batches; its number is `step + 1`, as records count from 1.

    The gradient is that of (sum of losses) / (number of targets), both over all ranks and micro-batches. A step whose
    norm is not finite changes neither weights nor optimizer state.
    """
    progress = run.dist.progress
    progress.enter("data", step + 1)
    began = time.perf_counter()
    batches = run.data.train.step_batches(step)
    busy = waited = time.perf_counter() - began
    sums = torch.zeros(3, dtype=torch.float64, device=run.dist.device)
    for index, batch in enumerate(batches):
        batch = batch.to(run.dist.device)
        run.backend.sync(index == len(batches) - 1)
        progress.enter("forward")
        began = time.perf_counter()
        loss = run.loss_fn(run.module, batch)
        busy += time.perf_counter() - began
        progress.enter("backward")
        loss.total.backward()
        sums += torch.stack([loss.total.detach().double(), loss.count.double(), batch.num_tokens.double()])
    progress.enter("optimizer")
    sums = sum_over_ranks(torch.cat([sums, _own_slots(sums[0], busy, run.dist)]), run.dist)
    run.backend.scale_grads(1.0 / sums[1].clamp(min=1.0))
    norm = run.backend.clip(run.config.optim.max_grad_norm)
    finite = torch.isfinite(norm) & torch.isfinite(sums[0])
    apply_update(run.optimizer, lr, finite)
    values = torch.cat([sums[:3], torch.stack([norm.double(), finite.double()]), sums[3:]])
    return _on_its_way(step + 1, lr, waited, values)


def _own_slots(loss: torch.Tensor, busy: float, dist: Dist) -> torch.Tensor:
    """[2·ranks] zeros but for this rank's entries, so that the sum over ranks holds everybody's."""
    slots = torch.zeros(2, dist.world_size, dtype=torch.float64, device=dist.device)
    slots[0, dist.rank] = busy
    slots[1, dist.rank] = (~torch.isfinite(loss)).double()
    return slots.flatten()


def apply_update(optimizer: torch.optim.Optimizer, lr: float, finite: torch.Tensor) -> None:
    """Step the optimizer unless `finite` (a bool scalar on the device) is false, and drop the gradients."""
    set_learning_rate(optimizer, lr)
    optimizer.found_inf = (~finite).float()  # read on the device, so nobody waits for the value
    optimizer.step()
    del optimizer.found_inf
    optimizer.zero_grad(set_to_none=True)


def _on_its_way(step: int, lr: float, waited: float, values: torch.Tensor) -> StepValues:
    if values.device.type != "cuda":
        return StepValues(step, lr, waited, values, None)
    pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    pinned.copy_(values, non_blocking=True)
    ready = torch.cuda.Event(enable_timing=True)
    ready.record()
    return StepValues(step, lr, waited, pinned, ready)
