"""A copy of this rank's state in memory that its saver process maps too, so that training goes on at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.packing import pack, packed_bytes
from trainer.checkpoint.region import Region
from trainer.checkpoint.states import State

PIECE_BYTES = 64 * 2**20
"""Pages are made and pinned so many at a time, with as long a pause between two: while CUDA pins memory, no other
thread can launch a kernel. A multiple of `packing.ALIGNMENT`, so no value lies in two pieces."""


class Staging:
    """Memory for one copy of the state, made once by `allocate`; every `copy` overwrites the one before."""

    def __init__(self, device: torch.device, *, piece_bytes: int = PIECE_BYTES) -> None:
        self._piece_bytes = piece_bytes
        self._on_cuda = device.type == "cuda"
        self._region: Region | None = None
        self._pinned: list[int] = []
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None
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

    def copy(self, state: State) -> tuple[State, Callable[[], None]]:
        """A description of the copy, and a function that waits until it is there.

        Returns once the copy is under way. On CUDA that is beside the device's other work: `when_copied` must be called
        before anything changes the state.
        """
        needed = packed_bytes(state)
        if self._region is None or needed > self._region.size:
            self.allocate(needed, beside=False)
        if not self._on_cuda:
            return pack(state, self._copy), lambda: None
        self._stream = self._stream or torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            packed = pack(state, self._copy)
            copied = self._copied = torch.cuda.Event(blocking=True)  # who waits for it sleeps
            copied.record()
        return packed, copied.synchronize

    def when_copied(self, *ignored: Any) -> None:
        """Let the device's work that comes now, such as the optimizer's step, wait for the copy; the host does not."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

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
