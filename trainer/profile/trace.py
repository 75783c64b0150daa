"""Every rank's traces of the steps that the config names, with a table of each step's time, and memory snapshots."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from trainer.dist import gather
from trainer.metrics.flops import sustained_flops
from trainer.models.float8 import uses_float8
from trainer.profile.where import Ceiling, Event, StepTime, ceiling_of, where_kernels_went, where_operators_went
from trainer.train.run import Run
from trainer.train.step import NAMES, StepValues, StepWatcher

PROFILE_DIR = "profile"


def step_watchers(run: Run) -> list[StepWatcher]:
    """The watchers for this run's steps; prints a note if a named step is before the start."""
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
            continue  # config_notes has a note about it
        watchers += [partial(watcher, run)] if steps else []
    return watchers


@contextmanager
def trace_step(run: Run, step: int, values: list[StepValues]) -> Iterator[None]:
    """If the config names this step: a trace of its calls and kernels with their shapes, and a table of its time."""
    if step not in run.config.train.profile_steps:
        yield
        return
    on_gpu = run.dist.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    compiled = _compiled_frames()
    _synchronize(run)  # kernels of earlier steps do not belong to the trace
    with profile(activities=activities, record_shapes=True) as profiler:
        gather(None, run.dist.control_group)  # a rank whose profiler started late would look like communication
        yield
        _synchronize(run)  # kernels of this step belong to the trace
    run.dist.progress.enter("saving")  # reading a large trace takes a while
    time = where_it_went(profiler, on_gpu=on_gpu)
    ceiling = _ceiling(run, time, values[0]) if values else None
    lines, tree = _table(run, step, time, ceiling, compiled=_compiled_frames() - compiled)
    for line in lines:
        run.log.note(line)
    files: dict[str, Write] = {
        "txt": lambda path: path.write_text("\n".join([*lines, ""]), encoding="utf-8"),
        "json": lambda path: path.write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8"),
        "json.gz": lambda path: profiler.export_chrome_trace(str(path)),
    }
    _write(run, f"step_{step:06d}_rank_{run.dist.rank}", files)
    _await_all(run)


def where_it_went(profiler: profile, *, on_gpu: bool) -> StepTime:
    """The step's time from the profiler's events: the device's kernels, or without a device the operators."""
    wanted = DeviceType.CUDA if on_gpu else DeviceType.CPU
    events = [
        Event(event.name, event.time_range.start, event.time_range.end, event.device_resource_id)
        for event in profiler.events() or ()
        if event.device_type == wanted
        and _is_work(event.name, is_annotation=bool(event.is_user_annotation), on_gpu=on_gpu)
    ]
    return where_kernels_went(events) if on_gpu else where_operators_went(events)


def _is_work(name: str, *, is_annotation: bool, on_gpu: bool) -> bool:
    """Whether an event is a kernel or an operator, and not an annotated interval or a wait."""
    if is_annotation:  # torch's stands for an optimizer's operators; on a GPU it would cover gaps between kernels
        return not on_gpu and name.startswith("Optimizer.")
    return not name.endswith((" Sync", " Wait Event"))


def _table(
    run: Run, step: int, time: StepTime, ceiling: Ceiling | None, *, compiled: int
) -> tuple[list[str], dict[str, Any]]:
    """The table of the step's time, as lines and as JSON."""
    what = "on the device" if time.on_device else "by operator, as there is no device"
    lines = [f"where step {step} of rank {run.dist.rank} went, {what}:", *time.lines()]
    lines += [] if ceiling is None else [ceiling.line()]
    if compiled:
        lines.append(f"note: step {step} includes compilation, of {compiled} pieces of code: look at a later one")
    tree = {"step": step, "rank": run.dist.rank, "compiled": compiled, **time.as_dict()}
    return lines, tree | {"ceiling": None if ceiling is None else asdict(ceiling)}


def _ceiling(run: Run, time: StepTime, values: StepValues) -> Ceiling | None:
    """The ceiling for bf16 products on a known card, with the ranks' mean number of tokens, as they share evenly."""
    sustained = sustained_flops(torch.cuda.get_device_name(run.dist.device)) if time.on_device else None
    if run.peak_flops is None or sustained is None or uses_float8(run.module):
        return None
    counts = dict(zip(NAMES, values.read(), strict=False))
    names = ("tokens", "target tokens", "squared document lengths")
    tokens, targets, squares = (counts[name] / run.dist.world_size for name in names)
    return ceiling_of(
        time,
        products=run.flops.products * tokens - run.flops.head * (tokens - targets),
        attention=run.flops.attention * squares,
        peak_flops=run.peak_flops,
        sustained_flops=sustained,
    )


def _compiled_frames() -> int:
    """Number of Python frames that torch.compile has compiled in this process so far."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # importing it takes a second
    return 0 if dynamo is None else int(dynamo.counters["frames"]["total"])


@contextmanager
def snapshot_step(run: Run, step: int, values: list[StepValues]) -> Iterator[None]:
    """If the config names this step: records every allocation on the GPU with its stack."""
    if step not in run.config.train.memory_snapshot_steps:
        yield
        return
    torch.cuda.memory._record_memory_history()
    try:
        yield
        _synchronize(run)
        name = f"memory_step_{step:06d}_rank_{run.dist.rank}"
        _write(run, name, {"pickle": lambda path: torch.cuda.memory._dump_snapshot(str(path))})
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    _await_all(run)


def _await_all(run: Run) -> None:
    """Return when all ranks are here: waiting for a rank that writes longer would look like part of the next step."""
    gather(None, run.dist.control_group)


def _synchronize(run: Run) -> None:
    if run.dist.device.type == "cuda":
        torch.cuda.synchronize(run.dist.device)


Write = Callable[[Path], object]
"""Writes one file."""


def _write(run: Run, name: str, files: dict[str, Write]) -> None:
    """Write NAME.SUFFIX for each suffix. If the disk fails, the files are missing, and the run continues."""
    run.dist.progress.enter("saving")
    folder = run.run_dir / PROFILE_DIR
    paths = {suffix: folder / f"{name}.{suffix}" for suffix in files}
    try:
        folder.mkdir(exist_ok=True)
        for suffix, write in files.items():
            write(paths[suffix])
    except (OSError, RuntimeError) as error:
        run.log.note(f"warning: {folder / name} was not written: {error}")
        return
    for path in paths.values():
        run.log.note(f"wrote {path}")
