"""Which micro-batch is fastest on these devices: a few timed steps of each size, with the plan for memory that fits it.

The model has random weights and the rows are full, of one document each: neither weights nor data are read.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainer.batch import Batch
from trainer.building import graphed_micro_batches, seed_everything
from trainer.config.parallel import recompute_mode
from trainer.data.loader import Data
from trainer.data.steps import global_batch_size, micro_batches
from trainer.data.tokenizer import load_tokenizer, quiet_transformers, vocab_size
from trainer.dist import Dist, gather, on_rank0
from trainer.flops import flops_of, peak_flops
from trainer.hostmem import available_bytes
from trainer.losses import sft_loss
from trainer.memory.activations import Kernels
from trainer.memory.fitting import Fit, fit_into, free_bytes
from trainer.memory.plans import usable
from trainer.metrics import MetricsLog
from trainer.models.attention import fastest_kernels
from trainer.models.build import build_decoder, check_length
from trainer.models.decoder import DecoderShape
from trainer.models.shapes import model_folder, shape_from_config
from trainer.optim.build import build_optimizer
from trainer.parallel.choose import make_backend
from trainer.parallel.tensors import local_tensor
from trainer.probing import largest_batch
from trainer.run import Run
from trainer.schema import Config
from trainer.step import train_step
from trainer.words import GIB

WARM_STEPS, TIMED_STEPS = 2, 3
MOST_MICRO_BATCHES = 8
"""Of a timed step, whatever the global batch is: a step's own costs are spread over enough of them then."""
FIRST_TOKENS = 4096
"""Of the first size on a GPU, where it fits: fewer do not fill one."""
SLOWER = 0.98
"""Of the best: a smaller difference between two sizes says nothing."""
TIME_S = 100.0
"""No size is begun after that."""


@dataclass(frozen=True)
class Timed:
    """What a micro-batch size costs."""

    rows: int
    """Of seq_len tokens each."""
    plan: str
    step_ms: float
    micro_batches: int
    """Forwards of each timed step."""
    tokens_per_s_per_gpu: float
    mfu: float | None
    peak_gib: float | None


@dataclass(frozen=True)
class Calibration:
    """All sizes that were timed, and why no larger one was."""

    timed: tuple[Timed, ...]
    ended: str
    configured: int
    """Rows of the config's own micro-batch."""
    global_batch: int | None
    """Rows per step over all ranks, where the config says how many; then it stays."""
    by_accumulation: bool
    """It says so by `grad_accum_steps`."""
    by_tokens: bool
    """The config counts a micro-batch in tokens."""
    seq_len: int

    @property
    def best(self) -> Timed | None:
        return max(self.timed, key=lambda one: one.tokens_per_s_per_gpu, default=None)

    @property
    def overrides(self) -> list[str]:
        """To be pasted behind `train.py CONFIG`, for the best size."""
        if self.best is None:
            return []
        rows = self.best.rows
        size = f"micro_batch_tokens={rows * self.seq_len}" if self.by_tokens else f"micro_batch_size={rows}"
        kept = [] if self.global_batch is None else [f"global_batch_size={self.global_batch}"]
        dropped = ["grad_accum_steps=null"] if self.by_accumulation else []
        return [f"train.{words}" for words in (size, *kept, *dropped)]

    def render(self) -> list[str]:
        """The verdict in a few lines; the sizes were told as they came."""
        best = self.best
        if best is None:
            return [f"no size was timed: {self.ended}"]
        own = next((one for one in self.timed if one.rows == self.configured), None)
        gain = "" if own is None or own is best else f", {best.tokens_per_s_per_gpu / own.tokens_per_s_per_gpu:.2f} x"
        than = f"{gain} of the configured {self.configured}" if gain else ""
        lines = [f"no larger size: {self.ended}", f"fastest: {best.rows} rows{than}", " ".join(self.overrides)]
        if self.global_batch is None and best.rows != self.configured:
            step = f"a step is then of {best.rows} instead of {self.configured} rows a micro-batch"
            lines.append(f"note: {step}: train.global_batch_size keeps it as it is, or another learning rate may fit")
        return lines

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        timed = [asdict(one) for one in self.timed]
        best = self.best.rows if self.best else None
        return {"timed": timed, "ended": self.ended, "best_rows": best, "overrides": self.overrides}


HEADER = f"{'rows':>6}  {'plan':<58}{'step ms':>9}{'tok/s/GPU':>12}{'MFU':>8}{'peak GiB':>10}"


def render_timed(one: Timed) -> str:
    """A line of the table under HEADER."""
    mfu = "-" if one.mfu is None else f"{one.mfu:.1%}"
    peak = "-" if one.peak_gib is None else f"{one.peak_gib:.1f}"
    plan = one.plan.removeprefix("activation_checkpointing=")
    return f"{one.rows:>6}  {plan:<58}{one.step_ms:>9.1f}{one.tokens_per_s_per_gpu:>12,.0f}{mfu:>8}{peak:>10}"


def calibrate(config: Config, dist: Dist, *, tell: Callable[[str], None]) -> Calibration:
    """Time one size after another; every rank calls this. `tell` hears of each as it is done.

    Raises ConfigError and ModelError as a run would, and torch.OutOfMemoryError where one of several ranks has none
    left, for the others wait for it then.
    """
    quiet_transformers()
    tokenizer = load_tokenizer(config)
    folder = None if config.model.name is None else model_folder(config.model.name, dist, weights=False)
    shape = shape_from_config(config.model, vocab_size(tokenizer), folder=folder)
    check_length(config, shape)
    seed_everything(config, dist)
    bench = _Bench(config, shape, dist)
    began, timed = time.monotonic(), []
    tell(HEADER)
    with fastest_kernels():
        for rows in sizes(config, dist.world_size, first=bench.first_rows()):
            ended = bench.why_too_large(rows) or why_enough(timed, _seconds(began, dist))
            found = ended or bench.time(rows)
            if isinstance(found, str):
                ended = found
                break
            timed.append(found)
            tell(render_timed(found))
        else:
            ended = "a rank has no more rows in a step"
    given = config.train.global_batch_size is not None or config.train.grad_accum_steps is not None
    return Calibration(
        timed=tuple(timed),
        ended=ended,
        configured=rows_of(config),
        global_batch=global_batch_size(config, dist.world_size) if given else None,
        by_accumulation=config.train.grad_accum_steps is not None,
        by_tokens=config.train.micro_batch_tokens is not None,
        seq_len=config.data.seq_len,
    )


def sizes(config: Config, world_size: int, *, first: int) -> Iterator[int]:
    """Rows of a micro-batch, doubled each time, as far as a step has rows for every rank."""
    train = config.train
    given = train.global_batch_size is not None or train.grad_accum_steps is not None
    most = -(-global_batch_size(config, world_size) // world_size) if given else 2**20
    rows = min(first, most)
    while rows <= most:
        yield rows
        rows *= 2


def why_enough(timed: list[Timed], seconds: float) -> str | None:
    """Why no further size is tried after these; None: go on."""
    best = max(timed, key=lambda one: one.tokens_per_s_per_gpu, default=None)
    if best is not None and timed[-1].tokens_per_s_per_gpu < SLOWER * best.tokens_per_s_per_gpu:
        return f"{timed[-1].rows} rows are slower than {best.rows}"
    return f"{seconds:.0f} s have gone by" if seconds > TIME_S else None


def rows_of(config: Config) -> int:
    """Rows of seq_len tokens in the config's micro-batch."""
    tokens = config.train.micro_batch_tokens
    return max(1, tokens // config.data.seq_len) if tokens else config.train.micro_batch_size


def with_rows(config: Config, rows: int, world_size: int) -> Config:
    """The config with another micro-batch and, where it says how many rows a step has, as many."""
    train = config.train
    if train.global_batch_size is not None or train.grad_accum_steps is not None:
        train = replace(train, global_batch_size=global_batch_size(config, world_size), grad_accum_steps=None)
    if train.micro_batch_tokens is not None:
        return replace(config, train=replace(train, micro_batch_tokens=rows * config.data.seq_len))
    return replace(config, train=replace(train, micro_batch_size=rows))


def _seconds(began: float, dist: Dist) -> float:
    """Since then, as rank 0 sees it: all end at the same size."""
    return on_rank0(dist, lambda: time.monotonic() - began)


# --- a size -----------------------------------------------------------------------------------------------------------


class _SameBatch:
    """In the place of a loader: the same rows in every step."""

    def __init__(self, batch: Batch, count: int) -> None:
        self._batches = [batch] * count

    def step_batches(self, _step: int) -> list[Batch]:
        return self._batches


class _Bench:
    """One model for all sizes."""

    def __init__(self, config: Config, shape: DecoderShape, dist: Dist) -> None:
        self._config, self._shape, self._dist = _decided(config), shape, dist
        self._cuda = dist.device.type == "cuda"
        self._free = min(gather(self._free_bytes(), dist.control_group))
        self._kernels = Kernels.on(dist.device, config.parallel)
        start = self._fit(self.first_rows()).config
        self._backend = make_backend(start, dist)
        self._module = self._backend.prepare(build_decoder(start, shape))
        with torch.no_grad():
            for parameter in self._module.parameters():
                local_tensor(parameter).normal_(0, 0.02)
        self._optimizer = build_optimizer(self._module, config.optim)
        self._flops = flops_of(self._module, shape)

    def first_rows(self) -> int:
        """The size to begin with."""
        rows = max(1, FIRST_TOKENS // self._config.data.seq_len) if self._cuda else 1
        while rows > 1 and self.why_too_large(rows):
            rows //= 2
        return rows

    def time(self, rows: int) -> Timed | str:
        """Timed steps of a size; why there are none where its memory does not suffice in a world of one."""
        fit = self._fit(rows)
        run = self._run(fit.config)
        try:
            seconds, count = self._steps(run)
        except torch.OutOfMemoryError:
            if self._dist.world_size > 1:
                raise
            self._backend.settle()
            return f"{rows} rows are out of memory"
        finally:
            self._clean(run)
        tokens = rows * self._config.data.seq_len * count / seconds
        peak = peak_flops(self._config, self._dist)
        per_token = self._flops.per_token(self._config.data.seq_len)
        return Timed(
            rows=rows,
            plan=fit.choice.chosen.plan.render() if fit.choice else "",
            step_ms=seconds * 1e3,
            micro_batches=count,
            tokens_per_s_per_gpu=tokens,
            mfu=None if peak is None else per_token * tokens / peak,
            peak_gib=torch.cuda.max_memory_allocated(self._dist.device) / GIB if self._cuda else None,
        )

    def _run(self, config: Config) -> Run:
        """A run of that size, over the model that is there."""
        self._backend.rearrange(config)
        count = min(MOST_MICRO_BATCHES, micro_batches(config, self._dist.world_size))
        loss_fn = partial(sft_loss, packed=config.data.packing)
        batch = largest_batch(config)
        return Run(
            config=config,
            run_dir=Path(),
            dist=self._dist,
            backend=self._backend,
            module=self._module,
            optimizer=self._optimizer,
            data=Data(_SameBatch(batch.pin() if self._cuda else batch, count), None, None),  # type: ignore[arg-type]
            loss_fn=loss_fn,
            log=MetricsLog(Path(), total_steps=1, enabled=False),
            graphed=graphed_micro_batches(config, self._shape, self._backend, self._module, loss_fn),
        )

    def _steps(self, run: Run) -> tuple[float, int]:
        """Mean seconds of a step, the slowest rank's, and the micro-batches of one."""
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
        for step in range(WARM_STEPS):
            train_step(run, step, lr=0.0).read()
        began = time.perf_counter()
        for step in range(TIMED_STEPS):
            last = train_step(run, step, lr=0.0)
        last.read()  # waits for the device
        seconds = (time.perf_counter() - began) / TIMED_STEPS
        return max(gather(seconds, self._dist.control_group)), len(run.data.train.step_batches(0))

    def _clean(self, run: Run) -> None:
        run.graphed = None
        self._optimizer.zero_grad(set_to_none=True)
        gc.collect()
        if self._cuda:
            torch.cuda.empty_cache()

    def why_too_large(self, rows: int) -> str | None:
        """Why a size is not tried: the estimate says that it does not fit."""
        choice = self._fit(rows).choice
        if choice is None or choice.fits:
            return None
        return f"{rows} rows would need {choice.chosen.needs / GIB:.1f} GiB of {usable(choice.free) / GIB:.1f}"

    def _fit(self, rows: int) -> Fit:
        config = with_rows(self._config, rows, self._dist.world_size)
        world_size = self._dist.world_size
        return fit_into(config, self._shape, free=self._free, world_size=world_size, kernels=self._kernels)

    def _free_bytes(self) -> int:
        return free_bytes(self._dist.device) if self._cuda else available_bytes() or 2**50


def _decided(config: Config) -> Config:
    """CPU offload stays as it is, for the model is built once; with parallel.memory manual so does all else."""
    options = replace(config.parallel, cpu_offload=bool(config.parallel.cpu_offload))
    if options.memory == "manual":
        every = bool(options.reduce_every_micro_batch)
        mode: Any = recompute_mode(options)
        options = replace(options, activation_checkpointing=mode, reduce_every_micro_batch=every)
    return replace(config, parallel=options)
