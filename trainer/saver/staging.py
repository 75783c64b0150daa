"""Copies this rank's state into memory shared with its saver process, so that training continues at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.states import State
from trainer.saver.copy_memory import SpareMemory
from trainer.saver.region import Region, pack, room_for

PIECE_BYTES = 64 * 2**20
"""Bytes that are allocated and pinned at a time, each followed by a pause of the same duration: while CUDA pins memory,
no other thread can launch a kernel. A multiple of `region.ALIGNMENT`, so no single number spans two pieces."""

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types by element size in bytes. `_foreach_copy_` converts bf16 through fp32, and then every NaN has the same
bits."""

Value = tuple[int, Tensor]
"""A plain tensor's offset in the region in bytes, and the tensor."""
Spare = Callable[[int], Tensor]
"""Returns a [bytes] uint8 tensor on the device, of the size requested at the first call or smaller."""


class Staging:
    """Memory for one copy of the state, allocated once by `allocate`; every `copy` overwrites the previous one."""

    def __init__(self, device: torch.device, *, piece_bytes: int = PIECE_BYTES, spare: Spare | None = None) -> None:
        """`spare`: None uses free memory on a CUDA device, and none on other devices."""
        self._piece_bytes = piece_bytes
        self._device = device
        self._on_cuda = device.type == "cuda"
        self._spare = SpareMemory(device).take if spare is None and self._on_cuda else spare
        self._region: Region | None = None
        self._pinned: list[int] = []
        self._stream: torch.cuda.Stream | None = None
        self._settled: torch.cuda.Event | None = None
        self._is_cancelled = False

    @property
    def region(self) -> Region:
        assert self._region is not None
        return self._region

    def allocate(self, size: int, *, beside: bool = True) -> None:
        """Allocate the memory, pinned on CUDA. Takes seconds for some GB; the GIL is free during this time.

        `beside`: other threads train, so pause between the pieces. Raises OSError if the memory cannot be allocated.
        """
        self.close()
        self._region = Region.create(size)
        for start in range(0, self._region.size, self._piece_bytes):
            if self._is_cancelled:
                return
            began = time.perf_counter()
            piece = self._region.bytes[start : start + self._piece_bytes]
            piece.zero_()  # allocates its pages, without CUDA's lock
            if self._on_cuda:
                self._pin(piece)
                if beside:
                    time.sleep(time.perf_counter() - began)

    def reserve(self, size: int) -> None:
        """Allocate the device's spare memory and leave it to torch's allocator, so that the first copy need not wait
        for the device to map it (tens of ms). Call it after steps have allocated the memory that they need."""
        if self._on_cuda and self._spare:
            with torch.cuda.stream(self._beside()):
                self._spare(size)

    def copy(self, state: State) -> tuple[State, Callable[[], None]]:
        """Start the copy; returns the packed state (see `pack`) and a function that waits until the copy is complete.

        On CUDA the copy runs in parallel with the device's other work: `when_settled` must be called before anything
        changes the state.
        """
        values: list[Value] = []
        packed = pack(state, lambda offset, tensor: values.append((offset, tensor)))
        needed = end_of(values)
        if self._region is None or needed > self._region.size:
            self.allocate(needed, beside=False)
        if not self._on_cuda:
            self._bring(self._settle(values))
            return packed, lambda: None
        stream = self._beside()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            held = self._settle(values)
            self._settled = torch.cuda.Event()
            self._settled.record()
            self._bring(held)
            copied = torch.cuda.Event(blocking=True)  # a thread that waits for it sleeps
            copied.record()
        return packed, copied.synchronize

    def when_settled(self, *ignored: Any) -> None:
        """Make the device's further work, such as the optimizer's step, wait until the state may change; the host does
        not wait."""
        if self._settled is not None:
            torch.cuda.current_stream().wait_event(self._settled)

    def cancel(self) -> None:
        """Make an `allocate` in another thread return early."""
        self._is_cancelled = True

    def close(self) -> None:
        """Free the memory. No copy may be in use any more."""
        for pointer in self._pinned:
            torch.cuda.cudart().cudaHostUnregister(pointer)
        self._pinned.clear()
        if self._region is not None:
            self._region.close()
        self._region = None

    def _beside(self) -> torch.cuda.Stream:
        self._stream = self._stream or torch.cuda.Stream()
        return self._stream

    def _settle(self, values: list[Value]) -> Tensor:
        """Copy all values, so that the originals may change: as many as fit into the device's spare memory, the others
        into the region. Returns the used part of the spare memory; its layout is that of the region's beginning."""
        spare = torch.empty(0, dtype=torch.uint8)
        if self._spare and all(tensor.device.type == self._device.type for _, tensor in values):
            spare = self._spare(end_of(values))
        count = sum(end_of([value]) <= len(spare) for value in values)  # offsets rise, so these are the first
        copy_into(spare, values[:count])
        for offset, tensor in values[count:]:
            self._copy(offset, tensor)
        return spare[: end_of(values[:count])]

    def _bring(self, held: Tensor) -> None:
        """Copy the contents of the device's spare memory to the beginning of the region."""
        for start in range(0, len(held), self._piece_bytes):
            piece = held[start : start + self._piece_bytes]
            self.region.bytes[start : start + len(piece)].copy_(piece, non_blocking=True)

    def _copy(self, offset: int, tensor: Tensor) -> None:
        target = self.region.tensor(offset, tuple(tensor.shape), tensor.dtype)
        item, size = target.element_size(), target.numel() * target.element_size()
        if offset % self._piece_bytes + size <= self._piece_bytes:
            target.copy_(tensor, non_blocking=True)
            return
        # CUDA cannot copy across the border of two pieces that were pinned separately
        flat, values, begin = target.view(-1), tensor.contiguous().view(-1), 0
        while begin < len(values):
            room = self._piece_bytes - (offset + begin * item) % self._piece_bytes
            end = begin + room // item
            flat[begin:end].copy_(values[begin:end], non_blocking=True)
            begin = end

    def _pin(self, piece: Tensor) -> None:
        # if the system does not allow pinning, the copy is slower but equally correct
        if int(torch.cuda.cudart().cudaHostRegister(piece.data_ptr(), piece.numel(), 0)) == 0:
            self._pinned.append(piece.data_ptr())
            return
        with suppress(RuntimeError):  # clears CUDA's error; else this thread's next kernel would seem to fail
            torch.ones((), device="cuda")


def end_of(values: list[Value]) -> int:
    """The number of bytes up to the end of the last value."""
    if not values:
        return 0
    offset, tensor = values[-1]
    return offset + room_for(tensor.nbytes)


def copy_into(memory: Tensor, values: list[Value]) -> None:
    """Copy the values' bits to their byte offsets in `memory`."""
    for dtype in {tensor.dtype for _, tensor in values}:  # a few kernels copy all tensors of the same dtype and layout
        bits = BITS.get(dtype.itemsize, dtype)
        sources = [(offset, tensor.contiguous().view(bits)) for offset, tensor in values if tensor.dtype == dtype]
        targets = [memory[offset : offset + source.nbytes].view(bits).view(source.shape) for offset, source in sources]
        torch._foreach_copy_(targets, [source for _, source in sources])
