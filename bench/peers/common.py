"""The common parts of the peers' scripts: shapes, the clock, running a setting and printing its result."""

from __future__ import annotations

import datetime
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

from train_cases import SHAPES, TIED, doc_tokens, hf_config  # noqa: E402

__all__ = [
    "SHAPES", "TIED", "Settings", "StepClock", "doc_tokens", "hf_config", "init_dist", "rank", "report", "run_settings",
    "world",
]  # fmt: skip

Settings = dict[str, Any]


def rank() -> int:
    return int(os.environ.get("RANK", 0))


def world() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


class StepClock:
    """Marks step ends with CUDA events, so that timing adds no wait to the loop."""

    def __init__(self) -> None:
        self._marks: list[Any] = []
        self._cuda = torch.cuda.is_available()
        self.first_s: float | None = None

    def mark(self) -> None:
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())
        if len(self._marks) == 2:
            self._first_ended()

    def _first_ended(self) -> None:
        """Resets the peak: memory in use before sharding does not belong to a step's peak."""
        if self._cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        self.first_s = _seconds_since_start() if _is_first_setting else None

    def steps(self, warm: int) -> list[float]:
        """Seconds of each step after the first `warm`."""
        pairs = list(zip(self._marks, self._marks[1:], strict=False))[warm:]
        if not self._cuda:
            return [b - a for a, b in pairs]
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in pairs]


_is_first_setting = True


def _seconds_since_start() -> float:
    ticks = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return uptime - ticks / os.sysconf("SC_CLK_TCK")


def report(clock: StepClock, warm: int, *, loss: float | None = None, tokens: float | None = None) -> None:
    """Print the result of a setting, for bench/train.py to read. `tokens`: per step, of all ranks, if rows are not
    full."""
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    told = {
        "step_s": clock.steps(warm),
        "peak_gib": peak,
        "first_step_s": clock.first_s,
        "loss": loss,
        "tokens": tokens,
    }
    _emit({name: value for name, value in told.items() if value is not None})


def _emit(result: dict[str, Any]) -> None:
    if rank() == 0:
        print("RESULT " + json.dumps(result), flush=True)


def init_dist() -> torch.device:
    local = int(os.environ.get("LOCAL_RANK", 0))
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    torch.cuda.set_device(local)
    device = torch.device("cuda", local)
    dist.init_process_group("cuda:nccl,cpu:gloo", device_id=device)
    return device


def run_settings(run_one: Callable[[Settings], None]) -> None:
    """Run each JSON setting of argv[1] in turn. A failure is reported, and the next setting runs."""
    global _is_first_setting
    for setting in json.loads(sys.argv[1]):
        why = ""
        try:
            run_one(setting)
        except torch.OutOfMemoryError as error:
            why = "out of memory: " + str(error)[:120]
        except Exception as error:
            traceback.print_exc()
            why = f"{type(error).__name__}: {error}"[:300]
        if why:
            _emit({"failed": why})
        _settle(not why)
        _is_first_setting = False
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def _settle(ok: bool) -> None:
    """Wait for the other ranks. End the process if they do not arrive because of a failure."""
    flag = torch.tensor([int(ok)])
    try:
        work = dist.all_reduce(flag, op=dist.ReduceOp.MIN, async_op=True)
        work.wait(timeout=datetime.timedelta(seconds=60 if ok else 12))
    except Exception as error:  # the others wait in a collective that will never finish
        print(f"rank {rank()}: the others did not arrive: {error}", file=sys.stderr, flush=True)
        os._exit(3)
