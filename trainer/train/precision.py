"""Resolves `train.precision=auto`: bf16 if all devices of the run multiply it in hardware, else fp32.

On a CPU without such instructions a bf16 product takes about fifty times as long as one in fp32.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch

from trainer.dist import Dist, gather
from trainer.schema import Config

Precision = Literal["bf16", "fp32"]

NOTHING: Mapping[str, Any] = MappingProxyType({})

CPU_INFO = Path("/proc/cpuinfo")
CPU_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Linux's names of the instructions that multiply bf16: the first two for x86-64, the last for ARM."""
SLOW = 3.0
"""If a bf16 product takes at least this many times as long as an fp32 one, it does not run in hardware; on an AVX2 CPU
it takes over 50 times as long."""
TIMED_SIZE, TIMED_ROUNDS, TIMED_S = 512, 30, 0.3
"""Rows of the timed product, the maximum number of rounds, and the seconds after which no further round starts. Several
rounds, because the first products of a new process, and those on a busy machine, may take a hundred times as long."""


@dataclass(frozen=True)
class ResolvedConfig:
    """A config in which the defaults that depend on the run have their values."""

    config: Config
    lines: list[str]
    """Lines to log before the first step; empty if the config sets everything."""


def resolve_precision(config: Config, dist: Dist, checkpoint: Mapping[str, Any] = NOTHING) -> ResolvedConfig:
    """Resolve `auto`: the precision of the checkpoint that the run resumes from, else the one for all devices.

    Every rank must call this. `checkpoint`: the config of that checkpoint.
    """
    if config.train.precision == "fp32":
        return ResolvedConfig(config, [])
    why_not = first_reason(why_no_bf16(dist.device), dist)
    if config.train.precision == "bf16":
        return ResolvedConfig(
            config, [f"warning: train.precision is bf16, and {why_not}: fp32 is faster here"] if why_not else []
        )
    saved = saved_precision(checkpoint)
    if saved is None:
        return _resolved(config, why_not)
    line = f"precision: {saved}, as the checkpoint has it (train.precision=auto)"
    if saved == "bf16" and why_not:
        line = f"warning: {line}; {why_not}, so it is slow: train.precision=fp32 changes it"
    return ResolvedConfig(with_precision(config, saved), [line])


def foresee_precision(config: Config) -> ResolvedConfig:
    """The value of `auto` for an inspection. Assumes that GPUs which are not present have bf16."""
    if config.train.precision != "auto":
        return ResolvedConfig(config, [])
    if config.target.device == "cpu":
        return _resolved(config, why_no_bf16(torch.device("cpu")))
    if torch.cuda.is_available():
        return _resolved(config, why_no_bf16(torch.device("cuda", 0)))
    return ResolvedConfig(
        with_precision(config, "bf16"), ["precision: bf16, if the GPUs have it (train.precision=auto)"]
    )


def with_precision(config: Config, precision: Precision) -> Config:
    return replace(config, train=replace(config.train, precision=precision))


def _resolved(config: Config, why_not: str | None) -> ResolvedConfig:
    chosen: Precision = "fp32" if why_not else "bf16"
    line = f"precision: {chosen}{f', {why_not}' if why_not else ''} (train.precision=auto)"
    return ResolvedConfig(with_precision(config, chosen), [line])


def saved_precision(checkpoint: Mapping[str, Any]) -> Precision | None:
    """The precision in a checkpoint's config; None if it has none."""
    section = checkpoint.get("train")
    saved = section.get("precision") if isinstance(section, Mapping) else None
    return "fp32" if saved == "fp32" else "bf16" if saved == "bf16" else None


# --- what a device can do ---------------------------------------------------------------------------------------------


def first_reason(own: str | None, dist: Dist) -> str | None:
    """The reason of the first rank that has one; the same on every rank."""
    return next(filter(None, gather(own, dist.control_group)), None)


def why_no_bf16(device: torch.device) -> str | None:
    """Why bf16 products are slow on this device; None if it has them in hardware."""
    if device.type == "cuda":
        able = torch.cuda.is_bf16_supported(including_emulation=False)
        return None if able else f"{torch.cuda.get_device_name(device)} has no bf16 in hardware"
    return why_no_bf16_on_cpu(cpu_flags(), bf16_ratio)


def why_no_bf16_on_cpu(flags: frozenset[str], ratio: Callable[[], float]) -> str | None:
    """Judged by the CPU's flags. If they include bf16, also by a timed product: libraries may be set not to use it.

    `ratio`: measures the time of a bf16 product as a multiple of the fp32 time.
    """
    if not flags:
        return "this CPU is not known to have bf16 in hardware"
    if not flags & CPU_FLAGS:
        return "this CPU has no bf16 in hardware"
    measured = ratio()
    if measured < SLOW:
        return None
    return f"bf16 products take {measured:.0f} x as long as fp32 here, though this CPU has bf16 in hardware"


def cpu_flags() -> frozenset[str]:
    """The instruction sets of the first processor, with Linux's names; empty on other systems."""
    try:
        return parse_flags(CPU_INFO.read_text(errors="replace"))
    except OSError:
        return frozenset()


def parse_flags(cpuinfo: str) -> frozenset[str]:
    """The words of the first `flags` (x86) or `Features` (ARM) line of /proc/cpuinfo."""
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    return next((frozenset(v.split()) for k, _, v in lines if k.strip() in ("flags", "Features")), frozenset())


def bf16_ratio() -> float:
    """The time of a bf16 product on this CPU as a multiple of the fp32 time: the best of several alternating rounds.

    The measurement takes milliseconds if bf16 is in hardware, else about half a second.
    """
    dtypes = (torch.bfloat16, torch.float32)
    matrices = [torch.ones(TIMED_SIZE, TIMED_SIZE, dtype=dtype) for dtype in dtypes]
    best = [float("inf")] * len(dtypes)
    began = time.perf_counter()
    for number in range(TIMED_ROUNDS):
        for i, matrix in enumerate(matrices):
            start = time.perf_counter()
            torch.mm(matrix, matrix)
            best[i] = min(best[i], time.perf_counter() - start)
        if number and time.perf_counter() - began > TIMED_S:
            break
    return best[0] / best[1]
