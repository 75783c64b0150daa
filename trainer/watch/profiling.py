"""Traces and memory snapshots of the steps that the config names, written into the run folder by every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from trainer.run import Run

PROFILE_DIR = "profile"

StepWatcher = Callable[[int], AbstractContextManager[None]]
"""What stands around a step, whose number counts from 1."""


def step_watchers(run: Run) -> list[StepWatcher]:
    """Who wants to watch steps of this run; says so where a named step cannot be watched."""
    train, on_gpu = run.config.train, run.dist.device.type == "cuda"
    watchers: list[StepWatcher] = []
    for key, steps, watcher in (
        ("profile_steps", train.profile_steps, trace_step),
        ("memory_snapshot_steps", train.memory_snapshot_steps, snapshot_step),
    ):
        past = [step for step in steps if step <= run.start_step]
        if past:
            run.log.note(f"note: train.{key} holds {past[0]}, and this start goes on after step {run.start_step}")
        if key == "memory_snapshot_steps" and not on_gpu:
            continue  # config_notes says so
        watchers += [partial(watcher, run)] if steps else []
    return watchers


@contextmanager
def watched(watchers: Sequence[StepWatcher], step: int) -> Iterator[None]:
    """The step, with everybody watching who wants to."""
    with ExitStack() as stack:
        for watcher in watchers:
            stack.enter_context(watcher(step))
        yield


@contextmanager
def trace_step(run: Run, step: int) -> Iterator[None]:
    """A trace of all calls and kernels in this step with their shapes, if the config names it."""
    if step not in run.config.train.profile_steps:
        yield
        return
    activities = [ProfilerActivity.CPU]
    if run.dist.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, record_shapes=True) as profiler:
        yield
        _synchronize(run)  # what the step has queued belongs to its trace
    _write(run, f"step_{step:06d}_rank_{run.dist.rank}.json.gz", lambda path: profiler.export_chrome_trace(str(path)))


@contextmanager
def snapshot_step(run: Run, step: int) -> Iterator[None]:
    """Every allocation on the GPU in this step with its stack, if the config names it."""
    if step not in run.config.train.memory_snapshot_steps:
        yield
        return
    torch.cuda.memory._record_memory_history()
    try:
        yield
        _synchronize(run)
        name = f"memory_step_{step:06d}_rank_{run.dist.rank}.pickle"
        _write(run, name, lambda path: torch.cuda.memory._dump_snapshot(str(path)))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def _synchronize(run: Run) -> None:
    if run.dist.device.type == "cuda":
        torch.cuda.synchronize(run.dist.device)


def _write(run: Run, name: str, write: Callable[[Path], None]) -> None:
    """Write one file; a disk that does not take it costs the file, not the run."""
    run.dist.progress.enter("saving")
    path = run.run_dir / PROFILE_DIR / name
    try:
        path.parent.mkdir(exist_ok=True)
        write(path)
    except (OSError, RuntimeError) as error:
        run.log.note(f"warning: {path} was not written: {error}")
        return
    run.log.note(f"wrote {path}")
