"""A copy of this rank's state in memory that its saver process maps too, so that training goes on at once."""

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
"""Pages are made and pinned so many at a time, with as long a pause between two: while CUDA pins memory, no other
thread can launch a kernel. A multiple of `region.ALIGNMENT`, so no value lies in two pieces."""

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes of a number. `_foreach_copy_` takes bf16 by way of fp32, after which every NaN has the same bits."""

Value = tuple[int, Tensor]
"""Where a plain tensor belongs in the region, in bytes from its beginning, and the tensor."""
Spare = Callable[[int], Tensor]
"""Gives [bytes] uint8 of the device: as many as asked for the first time, or fewer."""


class Staging:
    """Memory for one copy of the state, made once by `allocate`; every `copy` overwrites the one before."""

    def __init__(self, device: torch.device, *, piece_bytes: int = PIECE_BYTES, spare: Spare | None = None) -> None:
        """`spare`: None takes what is free on a CUDA device, and nothing elsewhere."""
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
        """Make the memory, pinned on CUDA: seconds for some GB, and the GIL is free meanwhile.

        `beside`: other threads train, and are let in between the pieces. Raises OSError where there is none.
        """
        self.close()
        self._region = Region.create(size)
        for start in range(0, self._region.size, self._piece_bytes):
            if self._is_cancelled:
                return
            began = time.perf_counter()
            piece = self._region.bytes[start : start + self._piece_bytes]
            piece.zero_()  # makes its pages, without CUDA's lock
            if self._on_cuda:
                self._pin(piece)
                if beside:
                    time.sleep(time.perf_counter() - began)

    def reserve(self, size: int) -> None:
        """Take the device's spare memory and leave it to torch's allocator, so that the first copy need not wait for
        the device to map it (tens of ms). When steps have taken what they need."""
        if self._on_cuda and self._spare:
            with torch.cuda.stream(self._beside()):
                self._spare(size)

    def copy(self, state: State) -> tuple[State, Callable[[], None]]:
        """A description of the copy, and a function that waits until it is there.

        Returns once the copy is under way. On CUDA that is beside the device's other work: `when_settled` must be
        called before anything changes the state.
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
            copied = torch.cuda.Event(blocking=True)  # who waits for it sleeps
            copied.record()
        return packed, copied.synchronize

    def when_settled(self, *ignored: Any) -> None:
        """Let the device's work that comes now, such as the optimizer's step, wait until the state may change; the host
        does not wait."""
        if self._settled is not None:
            torch.cuda.current_stream().wait_event(self._settled)

    def cancel(self) -> None:
        """Let an `allocate` in another thread come to its end."""
        self._is_cancelled = True

    def close(self) -> None:
        """Give the memory back; no copy may be in use any more."""
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
        """Copy all values so that they may change: as many as fit to the device's spare memory, which is returned and
        lies as the region's beginning does, the others to the region."""
        spare = torch.empty(0, dtype=torch.uint8)
        if self._spare and all(tensor.device.type == self._device.type for _, tensor in values):
            spare = self._spare(end_of(values))
        count = sum(end_of([value]) <= len(spare) for value in values)  # offsets rise, so these are the first
        copy_into(spare, values[:count])
        for offset, tensor in values[count:]:
            self._copy(offset, tensor)
        return spare[: end_of(values[:count])]

    def _bring(self, held: Tensor) -> None:
        """Copy what is in the device's spare memory to the beginning of the region."""
        for start in range(0, len(held), self._piece_bytes):
            piece = held[start : start + self._piece_bytes]
            self.region.bytes[start : start + len(piece)].copy_(piece, non_blocking=True)

    def _copy(self, offset: int, tensor: Tensor) -> None:
        target = self.region.tensor(offset, tuple(tensor.shape), tensor.dtype)
        item, size = target.element_size(), target.numel() * target.element_size()
        if offset % self._piece_bytes + size <= self._piece_bytes:
            target.copy_(tensor, non_blocking=True)
            return
        # CUDA takes no copy across the border of two pieces that were pinned one by one
        flat, values, begin = target.view(-1), tensor.contiguous().view(-1), 0
        while begin < len(values):
            room = self._piece_bytes - (offset + begin * item) % self._piece_bytes
            end = begin + room // item
            flat[begin:end].copy_(values[begin:end], non_blocking=True)
            begin = end

    def _pin(self, piece: Tensor) -> None:
        # not pinned where the system does not let us: the copy is slower, and as right
        if int(torch.cuda.cudart().cudaHostRegister(piece.data_ptr(), piece.numel(), 0)) == 0:
            self._pinned.append(piece.data_ptr())
            return
        with suppress(RuntimeError):  # CUDA keeps the error, and this thread's next kernel would be taken for failed
            torch.ones((), device="cuda")


def end_of(values: list[Value]) -> int:
    """The bytes up to the end of the last value."""
    if not values:
        return 0
    offset, tensor = values[-1]
    return offset + room_for(tensor.nbytes)


def copy_into(memory: Tensor, values: list[Value]) -> None:
    """Copy values bit by bit to their offsets in bytes of memory."""
    for dtype in {tensor.dtype for _, tensor in values}:  # what is alike in dtype and layout, a few kernels copy
        bits = BITS.get(dtype.itemsize, dtype)
        sources = [(offset, tensor.contiguous().view(bits)) for offset, tensor in values if tensor.dtype == dtype]
        targets = [memory[offset : offset + source.nbytes].view(bits).view(source.shape) for offset, source in sources]
        torch._foreach_copy_(targets, [source for _, source in sources])
