"""The training loop: normalise, clip, check, step, log, evaluate, save and stop, once for every recipe and backend.

Nothing in a step waits for the device: its values are read after the next step has been enqueued.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer import checkpoint
from trainer.batch import Batch, LossSum
from trainer.checkpoint import CheckpointError
from trainer.data.loader import Data
from trainer.dist import Dist, FlagBoard, sum_over_ranks
from trainer.metrics import MetricsLog, Record
from trainer.optim import lr_multiplier
from trainer.parallel import Backend
from trainer.schema import CHECKPOINTS_DIR, Config
from trainer.stopping import stop_requests

LossFn = Callable[[nn.Module, Batch], LossSum]


class NonFiniteError(Exception):
    """Too many steps in a row had a gradient or loss that is NaN or infinite."""


@dataclass
class Run:
    """Everything that a training run consists of; a recipe builds it and hands it to `train`."""

    config: Config
    run_dir: Path
    dist: Dist
    backend: Backend
    module: nn.Module
    optimizer: torch.optim.Optimizer
    data: Data
    loss_fn: LossFn
    log: MetricsLog
    flops_per_token: float = 0.0
    peak_flops: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    """Goes into every checkpoint's state.json."""
    start_step: int = 0


@dataclass(frozen=True)
class Result:
    """How a run ended: `stopped` when it was asked to before its last step."""

    step: int
    stopped: bool
    eval_loss_first: float | None
    """From before the first step."""
    eval_loss_last: float | None
    """None before there was a later evaluation."""


@dataclass(frozen=True)
class StepValues:
    """What a step has to tell, still on its way from the device: `values` may be read once `ready` says so."""

    step: int
    lr: float
    data_wait_s: float
    values: torch.Tensor  # [5] float64 on the CPU: loss sum, target tokens, tokens, gradient norm, finite
    ready: torch.cuda.Event | None

    def read(self) -> list[float]:
        if self.ready is not None:
            self.ready.synchronize()
        return self.values.tolist()


def train(run: Run) -> Result:
    """Train from `run.start_step` to the last step, or until asked to stop; evaluated and saved on the way.

    Raises NonFiniteError after `train.max_nonfinite_steps` skipped steps in a row, on every rank at the same step.
    """
    run.module.train()
    total = run.data.train.total_steps
    multiplier = lr_multiplier(run.config.optim, total)
    borders = Borders(run, total)
    with stop_requests(run.run_dir) as is_stop_requested:
        flags = FlagBoard(run.dist, width=1)
        if run.start_step == 0:
            borders.evaluate(0)
        steps = Reader(run)
        step, stopping = run.start_step, False
        while step < total and not stopping:
            steps.push(train_step(run, step, lr=run.config.optim.learning_rate * multiplier(step)))
            step += 1
            flags.post([int(is_stop_requested())])
            (asked,) = flags.read()
            stopping = bool(asked) or step - run.start_step == run.config.train.stop_after_steps
            if stopping or borders.is_due(step):
                steps.drain()
                borders.cross(step, stopping=stopping)
                steps.restart_clock()
        steps.drain()
        flags.read(keep=0)
    return Result(step, step < total, borders.first_loss, borders.last_loss)


def train_step(run: Run, step: int, *, lr: float) -> StepValues:
    """One optimizer step over this rank's micro-batches; its number is `step + 1`, as records count from 1.

    The gradient is that of (sum of losses) / (number of targets), both over all ranks and micro-batches. A step whose
    norm is not finite changes neither weights nor optimizer state.
    """
    waited = time.perf_counter()
    batches = run.data.train.step_batches(step)
    waited = time.perf_counter() - waited
    sums = torch.zeros(3, dtype=torch.float64, device=run.dist.device)
    for index, batch in enumerate(batches):
        batch = batch.to(run.dist.device)
        run.backend.sync(index == len(batches) - 1)
        loss = run.loss_fn(run.module, batch)
        loss.total.backward()
        sums += torch.stack([loss.total.detach().double(), loss.count.double(), batch.num_tokens.double()])
    sums = sum_over_ranks(sums, run.dist)
    run.backend.scale_grads(1.0 / sums[1].clamp(min=1.0))
    norm = run.backend.clip(run.config.optim.max_grad_norm)
    finite = torch.isfinite(norm) & torch.isfinite(sums[0])
    apply_update(run.optimizer, lr, finite)
    return _on_its_way(step + 1, lr, waited, torch.cat([sums, torch.stack([norm.double(), finite.double()])]))


def apply_update(optimizer: torch.optim.Optimizer, lr: float, finite: torch.Tensor) -> None:
    """Step the optimizer unless `finite` (a bool scalar on the device) is false, and drop the gradients."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.found_inf = (~finite).float()  # read by the fused kernel, so nobody waits for the value
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


@torch.no_grad()
def evaluate(run: Run) -> tuple[float, int] | None:
    """(loss per target token, target tokens) of the held-out data over all ranks; None when there is none."""
    batches = run.data.eval.batches()
    if not batches:
        return None
    run.module.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=run.dist.device)
    for batch in batches:
        loss = run.loss_fn(run.module, batch.to(run.dist.device))
        sums += torch.stack([loss.total.double(), loss.count.double()])
    run.module.train()
    total, count = sum_over_ranks(sums, run.dist).tolist()
    return total / max(count, 1.0), int(count)


class Borders:
    """What happens between two steps: evaluation and checkpoint, at the same steps on every rank."""

    def __init__(self, run: Run, total: int) -> None:
        self._run, self._total = run, total
        self.first_loss: float | None = run.extra.get("eval_loss_first")
        self.last_loss: float | None = run.extra.get("eval_loss_last")

    def is_due(self, step: int) -> bool:
        return self._is_eval_due(step) or self._is_save_due(step)

    def cross(self, step: int, *, stopping: bool) -> None:
        """Do what is due after `step` steps. A run that is asked to stop saves at once and looks at nothing more."""
        if self._is_eval_due(step) and (not stopping or step == self._total):
            self.evaluate(step)
        if self._is_save_due(step) or stopping:
            self.save(step, must_succeed=stopping or step == self._total)

    def evaluate(self, step: int) -> None:
        began = time.perf_counter()
        outcome = evaluate(self._run)
        if outcome is None:
            return
        loss, tokens = outcome
        if step == 0:
            self.first_loss = loss
        else:
            self.last_loss = loss
        self._run.extra.update(eval_loss_first=self.first_loss, eval_loss_last=self.last_loss)
        seconds = time.perf_counter() - began
        self._run.log.evaluation({"step": step, "eval_loss": loss, "eval_tokens": tokens, "eval_s": round(seconds, 3)})

    def save(self, step: int, *, must_succeed: bool) -> None:
        """Write a checkpoint; one that fails on the way is only reported, for the training is worth more than it."""
        run, folder = self._run, self._run.run_dir / CHECKPOINTS_DIR
        extra = {**run.extra, "data": run.data.train.state_dict(step)}
        try:
            path = checkpoint.save(folder, step, run.module, run.optimizer, extra, run.dist)
        except CheckpointError as error:
            if must_succeed:
                raise
            run.log.note(f"warning: {error}; training goes on from memory")
            return
        run.log.note(f"saved {path}")
        if run.dist.is_main:
            checkpoint.prune(folder, run.config.train.keep_last, newest=step)

    def _is_eval_due(self, step: int) -> bool:
        return step == self._total or _is_multiple(step, self._run.config.train.eval_every)

    def _is_save_due(self, step: int) -> bool:
        return step == self._total or _is_multiple(step, self._run.config.train.save_every)


def _is_multiple(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


class Reader:
    """Reads each step's values one step late and turns them into records."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._late: StepValues | None = None
        self._window = Window()
        self._skipped_in_a_row = 0
        self._clock = StepClock(run.dist.device)

    def push(self, values: StepValues) -> None:
        """Keep the newest step's values and read those of the step before; on the CPU they are there already."""
        late, self._late = self._late, values
        if late is not None:
            self._read(late)
        if values.ready is None:
            self.drain()

    def drain(self) -> None:
        """Read what is left."""
        late, self._late = self._late, None
        if late is not None:
            self._read(late)

    def restart_clock(self) -> None:
        """Do not count what came since the last step (evaluation, saving) as time of the next one."""
        self._clock.restart()

    def _read(self, late: StepValues) -> None:
        loss, targets, tokens, norm, finite = late.read()
        seconds = self._clock.lap(late.ready)
        self._window.add(loss, targets, tokens, finite=bool(finite), seconds=seconds, wait=late.data_wait_s)
        self._skipped_in_a_row = 0 if finite else self._skipped_in_a_row + 1
        if _is_multiple(late.step, self._run.config.train.log_every):
            self._run.log.train(self._record(late, norm))
            self._window = Window()
        self._check_finite(late.step, loss, norm)

    def _record(self, late: StepValues, norm: float) -> Record:
        window, run = self._window, self._run
        speed = window.tokens / max(window.seconds, 1e-9) / run.dist.world_size
        mfu = None if run.peak_flops is None else run.flops_per_token * speed / run.peak_flops
        record: Record = {
            "step": late.step,
            "loss": window.loss,
            "grad_norm": norm,
            "lr": late.lr,
            "tokens": int(window.tokens),
            "tokens_per_s_per_gpu": round(speed, 1),
            "mfu": mfu,
            "step_s": round(window.seconds / window.steps, 5),
            "data_wait_s": round(window.wait / window.steps, 5),
            "mem_gib": memory_gib(run.dist.device),
            "epoch": round(run.data.train.epoch_at(late.step), 4),
        }
        return {**record, "skipped": window.skipped} if window.skipped else record

    def _check_finite(self, step: int, loss: float, norm: float) -> None:
        run = self._run
        # a run shorter than the limit has failed too when nothing of it was learned
        limit = min(run.config.train.max_nonfinite_steps, run.data.train.total_steps)
        if self._skipped_in_a_row >= limit:
            first = step - self._skipped_in_a_row + 1
            raise NonFiniteError(
                f"steps {first} to {step} were skipped: loss sum {loss}, gradient norm {norm}. The weights are those "
                "from before them. Lower optim.learning_rate, lengthen optim.warmup_steps, or look at those steps' rows"
            )


class StepClock:
    """Seconds from the end of one step to the end of the next, by the device's own clock on CUDA: its values are read
    late, and when they are read says nothing about when the step ended."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self.restart()

    def restart(self) -> None:
        self._since = time.perf_counter()
        self._since_event: torch.cuda.Event | None = None
        if self._on_cuda:
            self._since_event = torch.cuda.Event(enable_timing=True)
            self._since_event.record()

    def lap(self, ended: torch.cuda.Event | None) -> float:
        """Seconds since the last lap; `ended` is the step's last event, which has happened."""
        if ended is None or self._since_event is None:
            since, self._since = self._since, time.perf_counter()
            return self._since - since
        seconds = self._since_event.elapsed_time(ended) / 1e3
        self._since_event = ended
        return seconds


@dataclass
class Window:
    """The sums over the steps since the last record."""

    steps: int = 0
    skipped: int = 0
    loss_sum: float = 0.0
    targets: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    wait: float = 0.0

    def add(self, loss: float, targets: float, tokens: float, *, finite: bool, seconds: float, wait: float) -> None:
        self.steps += 1
        self.tokens += tokens
        self.seconds += seconds
        self.wait += wait
        if finite:
            self.loss_sum += loss
            self.targets += targets
        else:
            self.skipped += 1

    @property
    def loss(self) -> float:
        """Per target token, over the steps that were not skipped; NaN when all were."""
        return self.loss_sum / self.targets if self.targets else float("nan")


def memory_gib(device: torch.device) -> float | None:
    """The most GPU memory that tensors have taken so far, in GiB; None on the CPU."""
    if device.type != "cuda":
        return None
    return round(torch.cuda.max_memory_allocated(device) / 2**30, 3)
