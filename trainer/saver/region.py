"""Memory shared by the trainer and its saver process, and a rank's state in it: bytes, and a description of them.

The description covers plain tensors, tensors made of several others (8-bit optimizer state), and shards of both.
"""

from __future__ import annotations

import copy
import ctypes
import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from trainer.checkpoint.states import Key, State, is_plain, key_of, map_leaves
from trainer.tensors import local_tensor

NAME = "checkpoint"  # shown in /proc/PID/maps
ALIGNMENT = 64
"""Bytes: a cache line, and a multiple of every dtype's size."""

Put = Callable[[int, Tensor], None]
"""Called for each plain tensor, with its offset in bytes and the tensor."""


class Region:
    """`size` bytes of anonymous shared memory; they exist as long as a process has them mapped or open."""

    def __init__(self, descriptor: int, size: int) -> None:
        """Map the memory of a descriptor. This object then owns the descriptor."""
        self.descriptor = descriptor
        self.size = size
        self._memory = mmap.mmap(descriptor, size)
        with suppress(OSError, AttributeError, ValueError):  # fewer pages to map, if the system has large ones
            self._memory.madvise(mmap.MADV_HUGEPAGE)

    @classmethod
    def create(cls, size: int) -> Region:
        """A new region; its pages are not allocated yet. Not a file in /dev/shm, because containers have 64 MB there.

        Raises OSError if the system has no such memory.
        """
        descriptor = _memfd()(NAME)
        os.ftruncate(descriptor, max(size, mmap.PAGESIZE))
        return cls(descriptor, max(size, mmap.PAGESIZE))

    @cached_property
    def bytes(self) -> Tensor:
        """[size] uint8: the whole region."""
        return torch.frombuffer(self._memory, dtype=torch.uint8)

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The tensor at an offset. Its storage covers exactly this tensor."""
        count = torch.Size(shape).numel()
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=offset).view(shape)

    def close(self) -> None:
        """Close the descriptor. The memory is freed when no tensor uses it, here and in the other process."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def why_no_shared_memory() -> str | None:
    """Why this system cannot share memory between processes without a file; None if it can."""
    return None if _libc_memfd() or hasattr(os, "memfd_create") else "this system has no memfd_create"


def _memfd() -> Callable[[str], int]:
    if hasattr(os, "memfd_create"):
        return os.memfd_create
    create = _libc_memfd()
    if create is None:
        raise OSError("this system has no memfd_create")
    return create


def _libc_memfd() -> Callable[[str], int] | None:
    """The C library's function: a Python that was built on an older system lacks os.memfd_create."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "memfd_create", None)
    if function is None:
        return None

    def create(name: str) -> int:
        descriptor = int(function(name.encode(), 1))  # MFD_CLOEXEC
        if descriptor < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "memfd_create")
        return descriptor

    return create


# --- a state in a region ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plain:
    """A contiguous tensor at an offset in bytes."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Compound:
    """A tensor that stores its values in several other tensors."""

    kind: type[Any]
    parts: dict[str, Any]
    meta: Any
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class Sharded:
    """This rank's part of a tensor that is sharded over the ranks of a mesh. `shape`: of the full tensor."""

    local: Plain | Compound
    mesh: Any
    """Nested lists of ranks."""
    placements: tuple[Any, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def pack(state: State, put: Put) -> State:
    """The state with a description in place of each tensor. Calls `put` for each plain one, once for tied ones."""
    return _Packer(put).pack(state)


def packed_bytes(state: State) -> int:
    """The bytes that `pack` needs for the state."""
    packer = _Packer(lambda offset, tensor: None)
    packer.pack(state)
    return packer.end


def room_for(size: int) -> int:
    """The bytes that a tensor of `size` bytes takes in a region."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class _Packer:
    def __init__(self, put: Put) -> None:
        self._put = put
        self._done: dict[Key, Plain] = {}
        self._meshes: dict[int, Any] = {}  # torch recomputes the ranks each time
        self.end = 0

    def pack(self, state: State) -> State:
        return dict(map_leaves(self._leaf, state))

    def _leaf(self, path: str, leaf: Any) -> Any:
        if isinstance(leaf, DTensor):
            local, mesh = self._local(local_tensor(leaf)), self._ranks(leaf.device_mesh)
            return Sharded(local, mesh, tuple(leaf.placements), tuple(leaf.shape), tuple(leaf.stride()))
        return self._local(leaf.detach()) if isinstance(leaf, Tensor) else copy.deepcopy(leaf)

    def _ranks(self, mesh: DeviceMesh) -> Any:
        if id(mesh) not in self._meshes:
            self._meshes[id(mesh)] = mesh.mesh.tolist()
        return self._meshes[id(mesh)]

    def _local(self, tensor: Any) -> Plain | Compound:
        if is_plain(tensor):
            return self._plain(tensor)
        names, meta = tensor.__tensor_flatten__()
        parts = {name: self._local(getattr(tensor, name)) for name in names}
        return Compound(type(tensor), parts, meta, tuple(tensor.shape), tuple(tensor.stride()))

    def _plain(self, tensor: Tensor) -> Plain:
        key = key_of(tensor)
        if key not in self._done:
            self._done[key] = Plain(self.end, tuple(tensor.shape), tensor.dtype)
            self._put(self.end, tensor)
            self.end += room_for(tensor.numel() * tensor.element_size())
        return self._done[key]


def unpack(state: State, region: Region) -> State:
    """The state that `pack` described, with its tensors in the region. Needs a process group, but no other rank."""

    def local_of(packed: Plain | Compound) -> Any:
        if isinstance(packed, Plain):
            return region.tensor(packed.offset, packed.shape, packed.dtype)
        parts = {name: local_of(part) for name, part in packed.parts.items()}
        kind: Any = packed.kind
        return kind.__tensor_unflatten__(parts, packed.meta, packed.shape, packed.stride)

    def tensor_of(path: str, leaf: Any) -> Any:
        if isinstance(leaf, Plain | Compound):
            return local_of(leaf)
        if not isinstance(leaf, Sharded):
            return leaf
        mesh = DeviceMesh("cpu", leaf.mesh, _init_backend=False)  # not used for communication, so it needs no groups
        local, shape = local_of(leaf.local), torch.Size(leaf.shape)
        return DTensor.from_local(local, mesh, leaf.placements, run_check=False, shape=shape, stride=leaf.stride)

    with torch.no_grad():
        return dict(map_leaves(tensor_of, state))
