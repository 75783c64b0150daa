"""A rank's state as bytes in one piece of memory and a description of them, which another process understands.

What is described: plain tensors, those that are several in one (8-bit optimizer state), and shards of either.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from trainer.checkpoint.states import Key, State, is_plain, key_of, map_leaves
from trainer.saver.region import Region
from trainer.tensors import local_tensor

ALIGNMENT = 64
"""Bytes: a cache line, and a multiple of every dtype's size."""

Put = Callable[[int, Tensor], None]
"""Hears where each plain tensor belongs: its offset in bytes, and the tensor."""


@dataclass(frozen=True)
class Plain:
    """A contiguous tensor at an offset in bytes."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Compound:
    """A tensor that keeps its values in several others."""

    kind: type[Any]
    parts: dict[str, Any]
    meta: Any
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class Sharded:
    """This rank's part of a tensor of the given shape, which the ranks of a mesh hold together."""

    local: Plain | Compound
    mesh: Any
    """Nested lists of ranks."""
    placements: tuple[Any, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def pack(state: State, put: Put) -> State:
    """The state with a description in place of each tensor; `put` hears of each plain one, of tied ones once."""
    return _Packer(put).pack(state)


def packed_bytes(state: State) -> int:
    """The bytes that `pack` needs for the state."""
    packer = _Packer(lambda offset, tensor: None)
    packer.pack(state)
    return packer.end


def room_for(size: int) -> int:
    """The bytes that a tensor of this many takes."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class _Packer:
    def __init__(self, put: Put) -> None:
        self._put = put
        self._done: dict[Key, Plain] = {}
        self._meshes: dict[int, Any] = {}  # torch computes its ranks anew each time
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
    """The state that `pack` has described, its tensors in the region. Needs a process group, and no other rank."""

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
        mesh = DeviceMesh("cpu", leaf.mesh, _init_backend=False)  # nobody talks over it, so it needs no groups
        local, shape = local_of(leaf.local), torch.Size(leaf.shape)
        return DTensor.from_local(local, mesh, leaf.placements, run_check=False, shape=shape, stride=leaf.stride)

    with torch.no_grad():
        return dict(map_leaves(tensor_of, state))
