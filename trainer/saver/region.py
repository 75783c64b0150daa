"""Memory that the trainer and its saver process both map: what one writes into it, the other reads."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property

import torch
from torch import Tensor

NAME = "checkpoint"  # shown in /proc/PID/maps


class Region:
    """`size` bytes of anonymous shared memory, which last as long as a process has them mapped or open."""

    def __init__(self, descriptor: int, size: int) -> None:
        """Map what a descriptor stands for; the descriptor is this object's from now on."""
        self.descriptor = descriptor
        self.size = size
        self._memory = mmap.mmap(descriptor, size)
        with suppress(OSError, AttributeError, ValueError):  # fewer pages to map, where the system has large ones
            self._memory.madvise(mmap.MADV_HUGEPAGE)

    @classmethod
    def create(cls, size: int) -> Region:
        """A region of its own, its pages not yet made. No file below /dev/shm: a container has 64 MB of that.

        Raises OSError where the system has no such memory.
        """
        descriptor = _memfd()(NAME)
        os.ftruncate(descriptor, max(size, mmap.PAGESIZE))
        return cls(descriptor, max(size, mmap.PAGESIZE))

    @cached_property
    def bytes(self) -> Tensor:
        """[size] uint8: all of it."""
        return torch.frombuffer(self._memory, dtype=torch.uint8)

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The tensor that lies at an offset, whose storage begins and ends with it."""
        count = torch.Size(shape).numel()
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=offset).view(shape)

    def close(self) -> None:
        """Give the descriptor back; the memory goes with the last tensor in it, and with the other process's."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def why_no_shared_memory() -> str | None:
    """Why this system has no memory for two processes that is no file; None where it has."""
    return None if _libc_memfd() or hasattr(os, "memfd_create") else "this system has no memfd_create"


def _memfd() -> Callable[[str], int]:
    if hasattr(os, "memfd_create"):
        return os.memfd_create
    create = _libc_memfd()
    if create is None:
        raise OSError("this system has no memfd_create")
    return create


def _libc_memfd() -> Callable[[str], int] | None:
    """The C library's function: a Python that was built on an older system lacks its own."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "memfd_create", None)
    if function is None:
        return None

    def create(name: str) -> int:
        descriptor = int(function(name.encode(), 1))  # MFD_CLOEXEC
        if descriptor < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "memfd_create")
        return descriptor

    return create
