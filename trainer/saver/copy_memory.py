"""Memory for copies of a state: whether this host has enough, and how much the GPU can spare.

A copy on the GPU takes milliseconds. A copy to the host takes hundreds of them (some 50 GB/s), and the optimizer's step
would have to wait for it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from trainer.checkpoint.shards import model_state
from trainer.checkpoint.states import is_plain
from trainer.host_memory import available_bytes
from trainer.kernels.adamw8bit import BLOCK
from trainer.optim.low_bit import is_quantised
from trainer.saver.region import packed_bytes, room_for
from trainer.tensors import local_tensor
from trainer.words import render_bytes

SHARE_OF_MEMORY = 0.8
"""The share of the available host memory that the copies of all ranks of this node may take."""
SAVER_BYTES = 300 * 2**20
"""The memory of a saver process without the copy: Python and torch without CUDA (torch 2.13: 274 MB)."""
CODES_BYTES = 256 * 4
"""The table of values that the 8-bit codes stand for."""
RESERVE, RESERVE_BYTES = 0.05, 2 * 2**30
"""What stays free, as a share of the GPU's memory and in bytes; the larger one counts. It is for later allocations of
the training, and for those that go directly to the driver: NCCL and kernels that are loaded late."""


def expected_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """The bytes of `sharded_state` once the optimizer has its state; too low for optimizers not known here."""
    return packed_bytes({"model": model_state(model)}) + sum(_optimizer_sizes(optimizer))


def why_no_room(needed: int, *, available: int | None = None, ranks: int | None = None) -> str | None:
    """Why this node has no memory for the savers and for a copy of `needed` bytes per rank; None if it has."""
    available = available_bytes() if available is None else available
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if ranks is None else ranks
    if available is None or (needed + SAVER_BYTES) * ranks <= SHARE_OF_MEMORY * available:
        return None
    return (
        f"{ranks} rank(s) would copy {render_bytes(needed)} each to the host's memory, "
        f"of which {render_bytes(available)} are available"
    )


def _optimizer_sizes(optimizer: torch.optim.Optimizer) -> Iterator[int]:
    for group in optimizer.param_groups:
        for parameter in (p for p in group["params"] if p.requires_grad):
            state = optimizer.state.get(parameter)
            if state:  # the run resumes from a checkpoint
                yield packed_bytes(dict(state))
            elif isinstance(optimizer, torch.optim.AdamW):
                yield 2 * _size(parameter) + room_for(4)
            elif hasattr(optimizer, "found_inf"):  # the trainer's own, with 8-bit state
                yield 2 * _low_bit_size(parameter) + room_for(4)


def _size(parameter: Tensor) -> int:
    local = local_tensor(parameter)
    return room_for(local.numel() * local.element_size()) if is_plain(local) else 0


def _low_bit_size(parameter: Tensor) -> int:
    if not is_quantised(parameter):
        return _size(parameter)
    count = local_tensor(parameter).numel()
    return room_for(count) + room_for(4 * -(-count // BLOCK)) + room_for(CODES_BYTES)


# --- the GPU's memory ------------------------------------------------------------------------------------------------


class SpareMemory:
    """Memory of a CUDA device, taken at each save and returned to torch's allocator right after.

    The first call fixes the size, after steps have allocated the memory that they need. Once the training has run short
    of memory, so that the allocator returned this memory to the device, `take` returns none any more.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._size: int | None = None
        self._shortages = 0

    def take(self, needed: int) -> Tensor:
        """[bytes] uint8 in the pool of the current stream, of the size needed at the first call, smaller, or empty."""
        if self._size is None:
            self._size = spare_bytes(needed, *torch.cuda.mem_get_info(self._device))
            self._shortages = shortages(self._device)
        elif shortages(self._device) > self._shortages:
            self._size = 0
        try:
            return torch.empty(self._size, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError:
            self._size = 0
            return torch.empty(0, dtype=torch.uint8, device=self._device)


def spare_bytes(needed: int, free: int, total: int) -> int:
    """How many of the `needed` bytes a device with `free` of `total` bytes can spare."""
    return max(0, min(needed, free - max(int(RESERVE * total), RESERVE_BYTES)))


def shortages(device: torch.device) -> int:
    """How often torch's allocator had to return cached memory to the device and retry."""
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))
