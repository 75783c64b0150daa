"""Reports a GPU that is out of memory, with numbers: what was requested, what uses the rest, and what would save
memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from trainer.dist import Dist
from trainer.failures.diagnose import place_of
from trainer.memory.estimate import Saving, estimate_memory, savings
from trainer.models.protocol import Shape
from trainer.progress import render_place
from trainer.schema import Config
from trainer.words import render_bytes

UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
FRAGMENTED_SHARE, FRAGMENTED_BYTES = 0.1, 2**30
"""The message recommends another allocator setting if more than this share of a GPU's memory is reserved in pieces, or
if the pieces would be enough for the request and have at least this many bytes."""
OTHERS_BYTES = 2**29
"""If other processes use more of the GPU's memory than this (more than the driver itself takes), the message names
them."""
SHOWN_SAVINGS = 4


class OutOfMemory(Exception):
    """A GPU has too little memory for the run; the message names ways to need less."""

    has_lines = True


@dataclass(frozen=True)
class OomFacts:
    """The numbers in torch's message, in bytes; None if the message lacks one."""

    asked: int | None
    gpu: int | None
    total: int | None
    free: int | None
    in_use: int | None
    allocated: int | None
    in_pieces: int | None

    @property
    def others(self) -> int:
        """Bytes that other processes use on this GPU."""
        if self.total is None or self.free is None or self.in_use is None:
            return 0
        return self.total - self.free - self.in_use

    @property
    def is_fragmented(self) -> bool:
        """Whether enough memory is reserved, but in pieces."""
        if self.in_pieces is None or self.total is None:
            return False
        enough = self.in_pieces >= max(self.asked or self.total, FRAGMENTED_BYTES)
        return enough or self.in_pieces > FRAGMENTED_SHARE * self.total


def parse_oom(message: str) -> OomFacts:
    """The numbers of a torch.OutOfMemoryError; torch has no attributes for them (messages of torch 2.1 and later)."""
    gpu = re.search(r"GPU (\d+) has a total", message)
    return OomFacts(
        asked=_size(r"Tried to allocate {}", message),
        gpu=int(gpu[1]) if gpu else None,
        total=_size(r"total capacity of {}", message),
        free=_size(r"of which {} is free", message),
        in_use=_size(r"this process has {} memory in use", message),
        allocated=_size(r"Of the allocated memory {} is allocated", message),
        in_pieces=_size(r"and {} is reserved by PyTorch but unallocated", message),
    )


def _size(pattern: str, message: str) -> int | None:
    found = re.search(pattern.format(r"([\d.]+) (bytes|KiB|MiB|GiB|TiB)"), message)
    return round(float(found[1]) * UNITS[found[2]]) if found else None


@contextmanager
def oom_advice(
    config: Callable[[], Config], shape: Shape, dist: Dist, *, on_failure: Callable[[], str | None]
) -> Iterator[None]:
    """Turn a torch.OutOfMemoryError from inside into OutOfMemory, with advice for this run.

    `config`: returns the current config. `on_failure`: called then; the message includes its result.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        facts = parse_oom(str(error))
        where = f"{render_place(dist.progress.phase, dist.progress.step)}, at {place_of(error)}"
        estimate = estimate_memory(shape, config(), world_size=dist.world_size)
        found = savings(shape, config(), world_size=dist.world_size)
        message = render_oom(facts, where=where, estimate=estimate.total, savings=found)
        further = on_failure()
        raise OutOfMemory(f"{message}\nnote: {further}" if further else message) from error


def render_oom(facts: OomFacts, *, where: str, estimate: int, savings: Sequence[Saving]) -> str:
    """The failure with its numbers, then what to change, the most effective first."""
    name = "the GPU" if facts.gpu is None else f"GPU {facts.gpu}"
    asked = "" if facts.asked is None else f": {render_bytes(facts.asked)} were asked for"
    lines = [f"{name} is out of memory{asked}, {where}"]
    if facts.total is not None and facts.free is not None:
        lines.append(f"  {render_bytes(facts.free)} of {render_bytes(facts.total)} are free{_holders(facts)}")
    lines.append(f"hint: this run needs about {render_bytes(estimate)} on each GPU (an estimate); what lowers it:")
    lines += [f"  {saving.render()}" for saving in savings[:SHOWN_SAVINGS]]
    if facts.is_fragmented:
        pieces = render_bytes(facts.in_pieces or 0)
        lines.append(f"  target.env.PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True joins the {pieces} in pieces")
    if facts.others > OTHERS_BYTES:
        others = render_bytes(facts.others)
        lines.append(f"  other processes hold {others} of this GPU (nvidia-smi shows them): end them or take another")
    return "\n".join(lines)


def _holders(facts: OomFacts) -> str:
    holders = []
    if facts.allocated is not None:
        holders.append(f"{render_bytes(facts.allocated)} hold tensors")
    if facts.in_pieces is not None:
        holders.append(f"{render_bytes(facts.in_pieces)} are reserved in pieces")
    return "; " + ", ".join(holders) if holders else ""
