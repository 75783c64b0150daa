"""One model, and timed steps of it with micro-batches of any size: what it takes to know what a size costs."""

from __future__ import annotations

import gc
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from trainer.batch import Batch
from trainer.calibration.sizes import Timed, first_size, with_rows
from trainer.config.parallel import recompute_mode
from trainer.data.batches.steps import micro_batches
from trainer.data.loader import Data
from trainer.dist import Dist, gather
from trainer.host_memory import available_bytes
from trainer.memory.activations import Kernels
from trainer.memory.fitting import Fit, fit_into, free_bytes
from trainer.memory.plans import usable
from trainer.metrics.flops import flops_of, peak_flops
from trainer.metrics.log import MetricsLog
from trainer.models.build import build_decoder
from trainer.models.decoder import DecoderShape
from trainer.models.losses import sft_loss
from trainer.optim.build import build_optimizer
from trainer.parallel.choose import make_backend
from trainer.schema import Config
from trainer.tensors import local_tensor
from trainer.train.build import graphed_micro_batches
from trainer.train.probe import largest_batch
from trainer.train.run import Run
from trainer.train.step import train_step
from trainer.words import GIB

WARM_STEPS, TIMED_STEPS = 2, 3
MOST_MICRO_BATCHES = 8
"""Of a timed step, whatever the global batch is: a step's own costs are spread over enough of them then."""


class _SameBatch:
    """In the place of a loader: the same rows in every step."""

    def __init__(self, batch: Batch, count: int) -> None:
        self._batches = [batch] * count

    def step_batches(self, _step: int) -> list[Batch]:
        return self._batches


class Bench:
    """One model for all sizes."""

    def __init__(self, config: Config, shape: DecoderShape, dist: Dist) -> None:
        self._config, self._shape, self._dist = _decided(config), shape, dist
        self._cuda = dist.device.type == "cuda"
        self._free = min(gather(self._free_bytes(), dist.control_group))
        self._kernels = Kernels.on(dist.device, config.parallel)
        self.first = first_size(config.data.seq_len, self.why_too_large, on_gpu=self._cuda)
        """Rows of the size to begin with."""
        start = self._fit(self.first).config
        self._backend = make_backend(start, dist)
        self._module = self._backend.prepare(build_decoder(start, shape))
        with torch.no_grad():
            for parameter in self._module.parameters():
                local_tensor(parameter).normal_(0, 0.02)
        self._optimizer = build_optimizer(self._module, config.optim)
        self._flops = flops_of(self._module, shape)

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
        mode, every = recompute_mode(options), bool(options.reduce_every_micro_batch)
        options = replace(options, activation_checkpointing=mode, reduce_every_micro_batch=every)
    return replace(config, parallel=options)
