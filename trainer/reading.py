"""The values of the steps, read late so that the device is never waited for, and the records made of them."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from trainer.metrics import Record
from trainer.run import Run
from trainer.step import StepValues


class NonFiniteError(Exception):
    """Too many steps in a row had a gradient or loss that is NaN or infinite."""


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
        loss, targets, tokens, norm, finite, *_ = late.read()
        seconds = self._clock.lap(late.ready)
        self._window.add(loss, targets, tokens, finite=bool(finite), seconds=seconds, wait=late.data_wait_s)
        self._skipped_in_a_row = 0 if finite else self._skipped_in_a_row + 1
        if late.step % self._run.config.train.log_every == 0:
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
