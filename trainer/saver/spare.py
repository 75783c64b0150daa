"""Memory of the GPU that the training does not use, for a copy of its state that takes milliseconds.

The way to the host takes hundreds of them (some 50 GB/s), and an optimizer's step would wait for it.
"""

from __future__ import annotations

import torch
from torch import Tensor

RESERVE, RESERVE_BYTES = 0.05, 2 * 2**30
"""What is left free, the larger of a part of the GPU's memory and some bytes: for what the training may yet ask for and
what asks the driver itself, NCCL and kernels that are loaded late."""


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
