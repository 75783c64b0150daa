"""Finds the fastest micro-batch on these devices: times a few steps of each size, with the plan for memory that fits.

The model has random weights, and each row is full, with one document: neither weights nor data are read.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import torch

from trainer.batch import Batch
from trainer.calibration.sizes import HEADER, Calibration, Timed, first_size, given_batch, search, sizes, with_rows
from trainer.config.batch import BatchRules
from trainer.config.parallel import recompute_mode
from trainer.console import write_json, write_line
from trainer.data.batches.steps import micro_batches
from trainer.data.loader import Data
from trainer.data.tokenize.tokenizer import quiet_transformers, settle_offline
from trainer.dist import Dist, gather, on_rank0, start_dist, stop_dist
from trainer.failures.watchdog import leave
from trainer.host_memory import available_bytes
from trainer.memory.activations import Kernels
from trainer.memory.fitting import Fit, fit_into, free_bytes
from trainer.memory.plans import usable
from trainer.metrics.flops import peak_flops
from trainer.metrics.log import MetricsLog
from trainer.models.attention import fastest_kernels
from trainer.models.build import build_model
from trainer.models.protocol import Shape
from trainer.optim.build import build_optimizer
from trainer.parallel.choose import make_backend
from trainer.schema import Config
from trainer.start.rank import FAILURES, comm_timeout_s, tell_failure, usable_device
from trainer.tensors import local_tensor
from trainer.train.build import graphed_micro_batches, seed_everything
from trainer.train.recipe import Recipe, make_recipe, read_basis
from trainer.train.resolve_defaults import resolve_defaults
from trainer.train.run import Run
from trainer.train.step import train_step
from trainer.words import GIB

WARM_STEPS, TIMED_STEPS = 2, 3
MOST_MICRO_BATCHES = 8
"""Limit for a timed step, for any global batch: with so many, the costs per step are spread enough."""


def calibrate_rank(config: Config, *, as_json: bool, debug: bool) -> int:
    """Time micro-batches with the other ranks, and return the exit code. A failing rank of several ends its process.

    The result goes to standard output; with `as_json` the table goes to standard error. A single rank raises
    KeyboardInterrupt.
    """
    dist = None
    try:
        dist = start_dist(usable_device(config), comm_timeout_s=comm_timeout_s(config.train.hang_timeout_s))
        is_main, table = dist.is_main, sys.stderr if as_json else sys.stdout

        def tell(line: str) -> None:
            if is_main:
                write_line(table, line)

        with redirect_stdout(sys.stderr):  # prints of libraries are not part of the result
            found = calibrate(config, dist, tell=tell)
    except KeyboardInterrupt:
        if dist is not None and dist.world_size > 1:
            leave(130)
        raise
    except FAILURES as error:
        code = tell_failure(error, None, debug=debug)
        if dist is not None and dist.world_size > 1:
            leave(code)
        return code
    if is_main:
        if as_json:
            write_json(found.to_dict())
        else:
            write_line(sys.stdout, "\n".join(found.render()))
    stop_dist()
    return 0 if found.timed else 1


def calibrate(config: Config, dist: Dist, *, tell: Callable[[str], None]) -> Calibration:
    """Time one size after another; every rank must call this. `tell` is called with a line after each.

    Raises ConfigError and ModelError as a run would. Raises torch.OutOfMemoryError if one of several ranks has no
    memory left, because the others wait for it then.
    """
    settle_offline(config)
    quiet_transformers()
    resolved = resolve_defaults(config, dist)
    config, recipe = resolved.config, make_recipe(config)
    shape = read_basis(recipe, config, dist, weights=False).shape
    seed_everything(config, dist)
    bench = Bench(recipe, config, shape, dist)
    began = time.monotonic()
    for line in [*resolved.lines, HEADER]:
        tell(line)
    with fastest_kernels():
        timed, ended = search(
            sizes(config, dist.world_size, first=bench.first),
            bench,
            seconds=lambda: on_rank0(dist, lambda: time.monotonic() - began),  # rank 0's: all end at the same size
            tell=lambda one: tell(one.render()),
        )
    return Calibration(
        timed=tuple(timed),
        ended=ended,
        configured=BatchRules.of(config).rows,
        global_batch=given_batch(config, dist.world_size),
        by_accumulation=config.train.grad_accum_steps is not None,
        by_tokens=config.train.micro_batch_tokens is not None,
        seq_len=config.data.seq_len,
    )


# --- timed steps -----------------------------------------------------------------------------------------------------


class _SameBatch:
    """Replaces a loader: the same rows in every step."""

    def __init__(self, batch: Batch, count: int) -> None:
        self._batches = [batch] * count

    def step_batches(self, _step: int) -> list[Batch]:
        return self._batches


class Bench:
    """One model that is timed at all sizes."""

    def __init__(self, recipe: Recipe, config: Config, shape: Shape, dist: Dist) -> None:
        self._recipe, self._config, self._shape, self._dist = recipe, _decided(config), shape, dist
        self._cuda = dist.device.type == "cuda"
        self._free = min(gather(self._free_bytes(), dist.control_group))
        self._kernels = Kernels.on(dist.device, config.parallel)
        self.first = first_size(config.data.seq_len, self.why_too_large, on_gpu=self._cuda)
        """Rows of the first size."""
        start = self._fit(self.first).config
        self._backend = make_backend(start, dist)
        model = build_model(start, shape)
        self._flops = model.flops()
        self._module = self._backend.prepare(model)
        with torch.no_grad():
            for parameter in self._module.parameters():
                local_tensor(parameter).normal_(0, 0.02)
        self._optimizer = build_optimizer(self._module, config.optim)

    def time(self, rows: int) -> Timed | str:
        """Time steps of a size. With a single rank that has too little memory: a text about that."""
        fit = self._fit(rows)
        run = self._run(fit.config)
        try:
            seconds, count = self._steps(run)
        except torch.OutOfMemoryError:
            if self._dist.world_size > 1:
                raise
            self._backend.forget_failed_pass()
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
        """A run of the config's size, with the existing model."""
        self._backend.rearrange(config)
        count = min(MOST_MICRO_BATCHES, micro_batches(config, self._dist.world_size))
        loss_fn, batch = self._recipe.loss(config), self._recipe.largest_batch(config)
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
        """Mean seconds of a step on the slowest rank, and the micro-batches of a step."""
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
        """Why a size is not tried: by the estimate it does not fit. None if it fits."""
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
    """The config with fixed CPU offload, because the model is built once; with parallel.memory manual, all memory keys
    are fixed."""
    options = replace(config.parallel, cpu_offload=bool(config.parallel.cpu_offload))
    if options.memory == "manual":
        mode, every = recompute_mode(options), bool(options.reduce_every_micro_batch)
        options = replace(options, activation_checkpointing=mode, reduce_every_micro_batch=every)
    return replace(config, parallel=options)
