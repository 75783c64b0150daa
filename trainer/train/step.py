"""One optimizer step: accumulate, normalise, clip, check, update. Nothing in it waits for the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Protocol, cast

import torch

from trainer.batch import add_terms
from trainer.dist import Dist, sum_over_ranks
from trainer.optim.build import set_learning_rate
from trainer.train.run import Run

NAMES = ("loss sum", "target tokens", "tokens", "gradient norm", "finite", "squared document lengths")
"""The first entries of StepValues.values. Then follow: for each rank the seconds for its data and its forward passes;
for each rank 1.0 if its loss was not finite; the sums of the loss's terms."""


@dataclass(frozen=True)
class StepValues:
    """The results of a step, while they are copied from the device: `values` is valid once `ready` has completed."""

    step: int
    lr: float
    data_wait_s: float
    values: torch.Tensor  # [6 + 2·ranks + terms] float64 on the CPU, see NAMES
    ready: torch.cuda.Event | None
    launched_s: float
    """time.perf_counter() when the host had launched the step; on the CPU the step had then ended."""
    terms: tuple[str, ...] = ()
    """Names of the loss's terms."""

    def read(self) -> list[float]:
        if self.ready is not None:
            self.ready.synchronize()
        return self.values.tolist()


StepWatcher = Callable[[int, list[StepValues]], AbstractContextManager[None]]
"""A context manager around a step: (its number, from 1; a list to which the step adds its values)."""


@contextmanager
def watched(watchers: Sequence[StepWatcher], step: int) -> Iterator[list[StepValues]]:
    """Enter all watchers' contexts around a step. Put the step's values into the list."""
    values: list[StepValues] = []
    with ExitStack() as stack:
        for watcher in watchers:
            stack.enter_context(watcher(step, values))
        yield values


def is_watched(run: Run, step: int) -> bool:
    """Whether the config asks to profile or snapshot this step: writing the results must not count as time of the next
    step."""
    train = run.config.train
    return step in train.profile_steps or step in train.memory_snapshot_steps


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
    sums = torch.zeros(4, dtype=torch.float64, device=run.dist.device)
    terms: dict[str, torch.Tensor] = {}
    for index, batch in enumerate(batches):
        batch = batch.to(run.dist.device)
        run.backend.sync(index == len(batches) - 1)
        progress.enter("forward")
        began = time.perf_counter()
        if run.graphed is not None:
            loss = run.graphed(batch, first=index == 0)
            busy += time.perf_counter() - began
        else:
            loss = run.loss_fn(run.module, batch)
            busy += time.perf_counter() - began
            progress.enter("backward")
            loss.total.backward()
        counts = torch.stack([loss.count, batch.num_tokens, batch.squared_lengths])
        sums += torch.cat([loss.total.detach().double()[None], counts.double()])
        if loss.terms:
            add_terms(terms, loss.terms)
    progress.enter("optimizer")
    own = [sums, _own_slots(sums[0], busy, run.dist), *(term[None] for term in terms.values())]
    sums = sum_over_ranks(torch.cat(own), run.dist)
    targets = sums[1].clamp(min=1.0).float()
    norm = run.backend.grad_norm() / targets
    divisor = targets * clip_divisor(norm, run.config.optim.max_grad_norm)
    finite = torch.isfinite(norm) & torch.isfinite(sums[0])
    if divides_by_itself(run.optimizer):
        apply_update(run.optimizer, lr, finite, divisor=divisor)
    else:
        run.backend.scale_grads(1.0 / divisor)
        apply_update(run.optimizer, lr, finite)
    loss_and_counts, the_others = sums[:3], sums[3:]
    values = torch.cat([loss_and_counts, torch.stack([norm.double(), finite.double()]), the_others])
    return copy_to_host_async(step + 1, lr, waited, values, terms=tuple(terms))


def _own_slots(loss: torch.Tensor, busy: float, dist: Dist) -> torch.Tensor:
    """[2·ranks] zeros except this rank's entries, so that the sum over ranks has the entries of all."""
    slots = torch.zeros(2, dist.world_size, dtype=torch.float64, device=dist.device)
    slots[0, dist.rank].fill_(busy)  # an assignment would wait for the device
    slots[1, dist.rank].copy_(~torch.isfinite(loss))
    return slots.flatten()


def clip_divisor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """The divisor that clips a gradient of this norm to `max_norm`; 1 if `max_norm` is 0."""
    return torch.clamp((norm + 1e-6) / max_norm, min=1.0) if max_norm > 0 else torch.ones_like(norm)


def divides_by_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer divides the gradients during its step, like torch's fused ones and the trainer's own."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)  # torch.amp.GradScaler checks this too


class _ReadOnDevice(Protocol):
    """Attributes that torch's fused optimizers and the trainer's own read in a step; torch's types lack them."""

    found_inf: torch.Tensor | None
    grad_scale: torch.Tensor | None


def apply_update(
    optimizer: torch.optim.Optimizer, lr: float, finite: torch.Tensor, *, divisor: torch.Tensor | None = None
) -> None:
    """Step the optimizer unless `finite` (a bool scalar on the device) is false, and delete the gradients.

    `divisor`: the gradients' divisor, for an optimizer with `divides_by_itself`.
    """
    set_learning_rate(optimizer, lr)
    # the CPU if any parameter is offloaded: the values must be there before the optimizer reads them
    devices = {parameter.device for group in optimizer.param_groups for parameter in group["params"]}
    device = min(devices, key=lambda device: device.type != "cpu")
    read = cast("_ReadOnDevice", optimizer)
    read.found_inf = (~finite).float().to(device)  # the host does not wait for the value
    if divisor is not None:
        read.grad_scale = divisor.to(device)
    optimizer.step()
    read.found_inf = read.grad_scale = None
    optimizer.zero_grad(set_to_none=True)


def copy_to_host_async(
    step: int, lr: float, waited: float, values: torch.Tensor, *, terms: tuple[str, ...] = ()
) -> StepValues:
    """The results of a step. `values`: float64 on the device; starts their copy to the host and does not wait."""
    if values.device.type != "cuda":
        return StepValues(step, lr, waited, values, None, time.perf_counter(), terms)
    pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    # written by a kernel: copies to the host run one after another, and that of a save takes hundreds of ms
    torch.mul(values, 1.0, out=_mapped(pinned, values.device))
    ready = torch.cuda.Event(enable_timing=True)
    ready.record()
    return StepValues(step, lr, waited, pinned, ready, time.perf_counter(), terms)


class _Array:
    """Lets torch make a tensor without a copy: https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html"""

    def __init__(self, pinned: torch.Tensor) -> None:
        self._kept = pinned
        self.__cuda_array_interface__ = {
            "shape": tuple(pinned.shape),
            "typestr": "<f8",
            "data": (pinned.data_ptr(), False),
            "version": 3,
        }


def _mapped(pinned: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Pinned float64 host memory as a tensor that the device's kernels can write: both use the same addresses."""
    return torch.as_tensor(_Array(pinned), device=device)
