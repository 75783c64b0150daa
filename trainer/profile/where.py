"""A step's time by classes of kernels: intervals are counted so that the classes add up to the step.

Kernels of several streams run at the same time. A moment in which several classes run belongs to the first of them in
the order of CLASSES: a row is the time that its class adds to the rows above; the rest of its time is hidden by them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

COMMUNICATION = "communication, exposed"
GAPS = "gaps"
REST = "elementwise and the rest"
CLASSES = ("products", "attention", "loss", "optimizer", "copies", REST, COMMUNICATION)
"""From a step's main work to work that should overlap with it."""

KERNELS = (
    (COMMUNICATION, r"nccl|multimem|symm_mem|(one|two)_shot_all_reduce"),
    ("products", r"^triton_tem_.*(?<![a-z])b?mm"),
    ("attention", r"^triton_tem_"),  # FlexAttention
    ("loss", r"^softmax_gradient|^scale$|^triton_.*softmax"),
    (REST, r"^triton_"),  # a fused kernel's name lists its operators
    ("attention", r"fmha|flash|sdpa|attention|cudnn::fusion|dot_do_o|convert_dq"),
    ("loss", r"soft_?max|nll_?loss"),
    ("optimizer", r"adam|lpnorm|lpmax|norm(one|two|inf)?ops|multi_tensor_apply_kernel(?!.*copy)"),
    ("copies", r"^mem(cpy|set)|split_with_sizes|chunk_cat|catarray|copy"),
    ("products", r"gemm|gemv|cutlass|nvjet|cublas|xmma|splitk|wgmma"),
)
"""A kernel belongs to the first pattern that its name matches, in upper or lower case: names of cuBLAS, cuDNN,
flash-attention, Inductor, NCCL and torch, as CUDA 12 and 13 show them on an H100. Without a match: the rest."""
OPERATORS = (
    (COMMUNICATION, r"^(gloo|nccl|mpi):|^c10d::|^_c10d_functional"),
    ("attention", r"scaled_dot_product|flash_attention|flex_attention"),
    ("products", r"^aten::(_scaled_)?(addmm|mm|bmm|baddbmm|addbmm)$|mkldnn_linear"),
    ("loss", r"softmax|nll_loss|cross_?entropy"),
    ("optimizer", r"^optimizer\.|adam|_foreach_norm|linalg_vector_norm"),
    ("copies", r"^aten::(_to_copy|copy_|cat|_chunk_cat|split_with_sizes_copy)$|^fsdp::"),
)
"""The same for the operators in a trace on the CPU."""


class Event(NamedTuple):
    """A kernel on the device, or an operator on the host; operators can contain others."""

    name: str
    start_us: float
    end_us: float
    stream: int = 0


@dataclass(frozen=True)
class Share:
    """A row: `ms` counts only for it; during `hidden_ms` it ran at the same time as a row above it (on the host: was
    called from there)."""

    name: str
    ms: float
    hidden_ms: float
    calls: int


@dataclass(frozen=True)
class StepTime:
    """A step from its first event to its last: the rows' `ms` add up to `span_ms`."""

    span_ms: float
    shares: tuple[Share, ...]
    """The classes in their order, then the gaps, in which nothing ran."""
    on_device: bool = True

    def of(self, name: str) -> Share:
        return next(share for share in self.shares if share.name == name)

    def percent(self, name: str) -> float:
        return 100 * self.of(name).ms / self.span_ms if self.span_ms else 0.0

    def lines(self) -> list[str]:
        """The table, one line for each row."""
        hidden, calls = ("hidden ms", "kernels") if self.on_device else ("", "operators")
        rows = [f"{'':26}{'ms':>10}{'%':>7}{calls:>11}{hidden:>12}".rstrip()]
        for share in self.shares:
            count = "" if share.name == GAPS else str(share.calls)
            hidden = f"{share.hidden_ms:.2f}" if self.on_device and share.name != GAPS else ""
            row = f"{share.name:26}{share.ms:>10.2f}{self.percent(share.name):>7.1f}{count:>11}{hidden:>12}"
            rows.append(row.rstrip())
        return [*rows, f"{'the step':26}{self.span_ms:>10.2f}{100.0 if self.span_ms else 0.0:>7.1f}"]

    def as_dict(self) -> dict[str, Any]:
        """For JSON: milliseconds and percent of the step."""
        shares = [asdict(share) | {"percent": round(self.percent(share.name), 3)} for share in self.shares]
        return {"span_ms": self.span_ms, "on_device": self.on_device, "shares": shares}


def where_kernels_went(events: Iterable[Event]) -> StepTime:
    """The time of the kernels, copies and fills of one device."""
    return _step_time(list(events), class_of_kernel, on_device=True)


def where_operators_went(events: Iterable[Event]) -> StepTime:
    """The time of the operators of one process without a device. An operator that another one calls counts in its own
    class, if that is above the caller's."""
    return _step_time(list(events), class_of_operator, on_device=False)


def class_of_kernel(name: str) -> str:
    return _first_match(KERNELS, name)


def class_of_operator(name: str) -> str:
    return _first_match(OPERATORS, name)


def _first_match(patterns: Sequence[tuple[str, str]], name: str) -> str:
    return next((kind for kind, pattern in patterns if re.search(pattern, name, re.IGNORECASE)), REST)


def _step_time(events: Sequence[Event], class_of: Callable[[str], str], *, on_device: bool) -> StepTime:
    kinds = {name: class_of(name) for name in {event.name for event in events}}
    covered: Intervals = []
    shares = []
    for kind in CLASSES:
        own = [event for event in events if kinds[event.name] == kind]
        alone = union((event.start_us, event.end_us) for event in own)
        before, covered = covered, union([*covered, *alone])
        added_us = length(covered) - length(before)
        shares.append(Share(kind, _ms(added_us), _ms(length(alone) - added_us), len(own)))
    span_us = covered[-1][1] - covered[0][0] if covered else 0.0
    shares.append(Share(GAPS, _ms(span_us - length(covered)), 0.0, 0))
    return StepTime(_ms(span_us), tuple(shares), on_device)


def _ms(us: float) -> float:
    return max(0.0, round(us / 1e3, 6))  # differences of sums can be -1e-12


Intervals = list[tuple[float, float]]
"""Sorted intervals that do not overlap."""


def union(intervals: Iterable[tuple[float, float]]) -> Intervals:
    """The time that at least one of the intervals covers."""
    merged: Intervals = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def length(intervals: Intervals) -> float:
    return sum(end - start for start, end in intervals)


# --- the card's ceiling ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ceiling:
    """Rates in TFLOP/s; MFU and the parts of the step in percent."""

    products_tflops: float
    sustained_tflops: float
    mfu: float
    gaps: float
    exposed: float
    mfu_without: float
    """MFU without gaps and without exposed communication."""

    def line(self) -> str:
        return (
            f"products at {self.products_tflops:.0f} of {self.sustained_tflops:.0f} TFLOP/s that the card sustains, "
            f"MFU {self.mfu:.1f} %; without the {self.gaps:.1f} % gaps and {self.exposed:.1f} % exposed communication "
            f"it would be {self.mfu_without:.1f} %"
        )


def ceiling_of(
    time: StepTime, *, products: float, attention: float, peak_flops: float, sustained_flops: float
) -> Ceiling | None:
    """`products` and `attention`: operations of the step on this card that training needs, without recomputation and
    padding. None for a step without products."""
    products_s = time.of("products").ms / 1e3
    if products_s == 0:
        return None
    gaps, exposed = time.percent(GAPS), time.percent(COMMUNICATION)
    mfu = 100 * (products + attention) / (time.span_ms / 1e3 * peak_flops)
    return Ceiling(
        products_tflops=products / products_s / 1e12,
        sustained_tflops=sustained_flops / 1e12,
        mfu=mfu,
        gaps=gaps,
        exposed=exposed,
        mfu_without=mfu / (1 - (gaps + exposed) / 100),
    )
