"""Reads the steps' values late, so that the host never waits for the device, and makes records of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from trainer.metrics.log import Record
from trainer.train.run import Run
from trainer.train.step import StepValues
from trainer.words import first_few


class NonFiniteError(Exception):
    """Too many steps in a row had a NaN or infinite gradient or loss."""


class Reader:
    """Reads each step's values one step late and turns them into records."""

    def __init__(self, run: Run, memory: PeakMemory) -> None:
        self._run = run
        self._memory = memory
        self._late: StepValues | None = None
        self._newest: tuple[StepValues, float] | None = None
        """The last step that was read, and its gradient norm."""
        self._window = Window()
        self._skipped_in_a_row = 0
        self._clock = StepClock(run.dist.device)
        self._start_s: float | None = None
        """The duration of the start, for the first record."""

    def push(self, values: StepValues) -> None:
        """Keep the newest step's values and read those of the previous step. On the CPU, also read the newest."""
        late, self._late = self._late, values
        if late is not None:
            self._read(late)
        if values.ready is None or values.step == self._run.start_step + 1:  # the first step, for the start's duration
            self.drain()

    def drain(self, *, at_end: bool = False) -> None:
        """Read the remaining values. `at_end` also records the steps since the last record, without regard to
        `train.log_every`."""
        late, self._late = self._late, None
        if late is not None:
            self._read(late)
        if at_end and self._newest is not None and self._window.steps:
            self._log(*self._newest)

    def restart_clock(self) -> None:
        """Do not count the time since the last step (evaluation, a synchronous save, a trace) as time of the next one.

        All steps must have been read (`drain`).
        """
        self._clock.restart()

    def _read(self, late: StepValues) -> None:
        loss, targets, tokens, norm, finite, squares, *rest = late.read()
        ranks = self._run.dist.world_size
        busy, bad, terms = rest[:ranks], rest[ranks : 2 * ranks], rest[2 * ranks :]
        self._tell_start()
        seconds = self._clock.lap(late)
        self._window.add(loss, targets, tokens, finite=bool(finite), seconds=seconds, wait=late.data_wait_s)
        self._window.squares += squares
        if finite:
            self._window.add_terms(late.terms, terms)
        self._window.add_busy(busy)
        self._skipped_in_a_row = 0 if finite else self._skipped_in_a_row + 1
        self._newest = late, norm
        if late.step % self._run.config.train.log_every == 0:
            self._log(late, norm)
        if not finite:
            self._tell_skipped(late.step, norm, ranks=[rank for rank, is_bad in enumerate(bad) if is_bad])
        self._check_finite(late.step, loss, norm)

    def _tell_start(self) -> None:
        report = self._run.dist.startup.finish()
        if report is not None:
            self._start_s = round(report.total_s, 2)
            self._run.log.note(report.render())

    def _log(self, late: StepValues, norm: float) -> None:
        self._run.log.train(self._record(late, norm))
        self._window = Window()

    def _record(self, late: StepValues, norm: float) -> Record:
        window, run = self._window, self._run
        speed = window.tokens / max(window.seconds, 1e-9) / run.dist.world_size
        mfu = None if run.peak_flops is None else run.flops.per_token(window.mean_length) * speed / run.peak_flops
        record: Record = {
            "step": late.step,
            "steps": run.data.train.total_steps,
            "loss": window.loss,
            **window.mean_terms(),
            "grad_norm": norm,
            "lr": late.lr,
            "tokens": int(window.tokens),
            "tokens_per_s_per_gpu": round(speed, 1),
            "mfu": mfu,
            "step_s": round(window.seconds / window.steps, 5),
            "data_wait_s": round(window.wait / window.steps, 5),
            "mem_gib": self._memory.gib(),
            "epoch": round(run.data.train.epoch_at(late.step), 4),
        }
        started = {} if self._start_s is None else {"start_s": self._start_s}
        self._start_s = None
        return {**record, **window.straggler(), **({"skipped": window.skipped} if window.skipped else {}), **started}

    def _tell_skipped(self, step: int, norm: float, *, ranks: list[int]) -> None:
        """Log which ranks' loss it was and the rows, as far as known. The same on every rank."""
        if not ranks:
            cause = f"gradient norm {norm}, though every rank's loss was finite"
        else:
            ids = self._run.data.train.rank_documents(step - 1, ranks[0])
            rows = f"; rows of rank {ranks[0]}: {first_few(ids, SHOWN_ROWS)}" if ids else ""
            cause = f"the loss of rank {', '.join(map(str, ranks))} was not finite{rows}"
        self._run.log.note(f"warning: step {step} skipped, the weights are as before it: {cause}")

    def _check_finite(self, step: int, loss: float, norm: float) -> None:
        run = self._run
        # a run shorter than the limit also fails if all its steps were skipped
        limit = min(run.config.train.max_nonfinite_steps, run.data.train.total_steps)
        if self._skipped_in_a_row >= limit:
            first = step - self._skipped_in_a_row + 1
            which = f"step {step} was" if first == step else f"steps {first} to {step} were"
            raise NonFiniteError(
                f"{which} skipped: loss sum {loss}, gradient norm {norm}. The weights are those "
                "from before them. Lower optim.learning_rate, lengthen optim.warmup_steps, or look at those steps' rows"
            )


SHOWN_ROWS = 8
"""The number of row IDs that a warning shows."""


class StepClock:
    """Seconds from the end of one step to the end of the next. On CUDA measured by events on the device, because the
    time at which a step's values are read does not show when it ended."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self.restart()

    def restart(self) -> None:
        self._since = time.perf_counter()
        self._since_event: torch.cuda.Event | None = None
        if self._on_cuda:
            self._since_event = torch.cuda.Event(enable_timing=True)
            self._since_event.record()

    def lap(self, values: StepValues) -> float:
        """Seconds from the last lap to the end of this step, whose values must be readable."""
        if values.ready is None or self._since_event is None:
            since, self._since = self._since, values.launched_s
            return self._since - since
        seconds: float = self._since_event.elapsed_time(values.ready) / 1e3
        self._since_event = values.ready
        return seconds


@dataclass
class Window:
    """The sums over the steps since the last record."""

    steps: int = 0
    skipped: int = 0
    loss_sum: float = 0.0
    targets: float = 0.0
    tokens: float = 0.0
    squares: float = 0.0
    """The sum of the squares of the documents' lengths."""
    seconds: float = 0.0
    wait: float = 0.0
    terms: dict[str, float] = field(default_factory=dict)
    """Sums of the loss's further terms, over the same steps."""
    busy: list[float] = field(default_factory=list)
    """Seconds of each rank's host before its backward passes, in which it waits for the others."""

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

    def add_terms(self, names: Sequence[str], sums: Sequence[float]) -> None:
        for name, value in zip(names, sums, strict=True):
            self.terms[name] = self.terms.get(name, 0.0) + value

    def mean_terms(self) -> Record:
        """The terms per target token, like the loss."""
        return {name: value / self.targets if self.targets else float("nan") for name, value in self.terms.items()}

    def add_busy(self, busy: list[float]) -> None:
        self.busy = [sum(pair) for pair in zip(self.busy or [0.0] * len(busy), busy, strict=True)]

    def straggler(self) -> Record:
        """The slowest rank, and its seconds as a multiple of the median of all ranks; empty for a single rank.

        On CUDA these are the host's seconds until its forward passes are launched: slow data and slow Python are
        visible here, a slow GPU is not.
        """
        if len(self.busy) < 2:
            return {}
        slowest = max(range(len(self.busy)), key=lambda rank: self.busy[rank])
        ratio = self.busy[slowest] / max(statistics.median_low(self.busy), 1e-9)
        return {"straggler": round(ratio, 3), "slowest_rank": slowest}

    @property
    def mean_length(self) -> float:
        """The mean length, over tokens, of the document that contains the token; in tokens."""
        return self.squares / self.tokens if self.tokens else 0.0

    @property
    def loss(self) -> float:
        """The loss per target token, over the steps that were not skipped; NaN if all were."""
        return self.loss_sum / self.targets if self.targets else float("nan")


class PeakMemory:
    """The peak GPU memory of the training's tensors so far."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_cuda = device.type == "cuda"
        self._earlier = 0

    def gib(self) -> float | None:
        """The peak in GiB; None on the CPU."""
        return round(self._bytes() / 2**30, 3) if self._on_cuda else None

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Memory that is allocated and freed inside does not count."""
        if not self._on_cuda:
            yield
            return
        self._earlier = self._bytes()
        yield
        torch.cuda.reset_peak_memory_stats(self._device)

    def _bytes(self) -> int:
        return max(self._earlier, torch.cuda.max_memory_allocated(self._device))
