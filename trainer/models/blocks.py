"""Weights, a few million values at a time and by several threads, from the host's memory to where a rank keeps them.

One thread makes 0.2e9 random values a second, and copies from memory that is not pinned reach a few GB/s: 1.5e9
parameters took ten seconds and more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from trainer.host_memory import cores_of_rank
from trainer.tensors import local_tensor, own_slices

BLOCK = 1 << 22
"""Values of a block, at most, unless one row has more; 16 MiB of fp32. Random weights depend on it."""
MAX_THREADS = 16


@dataclass(frozen=True)
class Block:
    """Some rows of a tensor, and what this rank keeps of them."""

    name: str
    number: int
    """Which block of the tensor; the division into blocks is the same for any number of ranks."""
    shape: tuple[int, ...]
    """Of the whole block."""
    own: tuple[slice, ...]
    """This rank's part of the block."""
    rows: tuple[slice, ...]
    """The same part, counted in the whole tensor."""
    target: Tensor
    """Where this rank keeps it."""

    def take(self, values: Tensor) -> None:
        """Put values (on the CPU, of any dtype) into the target; a GPU converts them itself, and nobody waits for it
        where they are pinned."""
        if self.target.is_cuda:
            pinned = values if values.is_pinned() else torch.empty_like(values, pin_memory=True).copy_(values)
            values = pinned.to(self.target.device, non_blocking=True)
        self.target.copy_(values)


def for_each_block(weights: Mapping[str, Tensor], work: Callable[[Block], None], *, threads: int | None = None) -> None:
    """Call `work` with each block that this rank keeps a part of, in several threads when the weights are large.

    Raises what the first failing block raised.
    """
    blocks = [block for name, parameter in weights.items() for block in blocks_of(name, parameter)]
    if threads is None:
        is_small = sum(block.target.numel() for block in blocks) <= BLOCK
        threads = 1 if is_small else min(MAX_THREADS, cores_of_rank())

    def run(block: Block) -> None:
        with torch.no_grad():  # of each thread's own
            work(block)

    if threads == 1:
        for block in blocks:
            run(block)
        return
    device = blocks[0].target.device
    # a thread's current device is the first one unless it says so, and pinning memory would start a context there
    start = (lambda: torch.cuda.set_device(device)) if device.type == "cuda" else None
    with ThreadPoolExecutor(threads, thread_name_prefix="weights", initializer=start) as pool:
        for _ in pool.map(run, blocks):
            pass


def blocks_of(name: str, parameter: Tensor) -> Iterator[Block]:
    """The blocks of a tensor that this rank keeps a part of."""
    local, (rows, *others) = local_tensor(parameter).detach(), own_slices(parameter)
    num_rows, *rest = parameter.shape
    step = max(1, BLOCK // max(1, prod(rest)))
    for number, begin in enumerate(range(0, num_rows, step)):
        end = min(begin + step, num_rows)
        first, last = max(begin, rows.start), min(end, rows.stop)
        if first < last:
            yield Block(
                name,
                number,
                (end - begin, *rest),
                (slice(first - begin, last - begin), *others),
                (slice(first, last), *others),
                local[first - rows.start : last - rows.start],
            )
