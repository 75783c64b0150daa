"""Memory for copies of a state: whether this host has it, and what the GPU can spare.

A copy on the GPU takes milliseconds. The way to the host takes hundreds of them (some 50 GB/s), and an optimizer's step
would wait for it.
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
"""Of the host memory that is available, what the copies of all ranks of this node may take."""
SAVER_BYTES = 300 * 2**20
"""What a saver process takes beside the copy: Python and torch without CUDA (torch 2.13: 274 MB)."""
CODES_BYTES = 256 * 4
"""The values that 8-bit codes stand for."""
RESERVE, RESERVE_BYTES = 0.05, 2 * 2**30
"""What is left free, the larger of a part of the GPU's memory and some bytes: for what the training may yet ask for and
what asks the driver itself, NCCL and kernels that are loaded late."""


def expected_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """What `sharded_state` will take once the optimizer has its state; too little for optimizers not known here."""
    return packed_bytes({"model": model_state(model)}) + sum(_optimizer_sizes(optimizer))


def why_no_room(needed: int, *, available: int | None = None, ranks: int | None = None) -> str | None:
    """Why this node's ranks cannot hold a copy of `needed` bytes each and their savers; None when they can."""
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
            if state:  # of a run that goes on from a checkpoint
                yield packed_bytes(dict(state))
            elif isinstance(optimizer, torch.optim.AdamW):
                yield 2 * _size(parameter) + room_for(4)
            elif hasattr(optimizer, "found_inf"):  # our own, whose state is in 8 bits
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
    """Memory of a CUDA device, asked for at each save and given back to torch's allocator right after.

    How much is settled when it is first asked for, after steps have taken what they need. Once the training has run
    short of memory, so that the allocator gave this back to the device, there is none any more.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._size: int | None = None
        self._shortages = 0

    def take(self, needed: int) -> Tensor:
        """[bytes] uint8 in the pool of the current stream: as many as were needed the first time, or fewer, or none."""
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
    """How many of the `needed` bytes a device with so much free memory can do without."""
    return max(0, min(needed, free - max(int(RESERVE * total), RESERVE_BYTES)))


def shortages(device: torch.device) -> int:
    """How often torch's allocator had to give back what it kept, to find memory on the device."""
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))
