"""A copy of this rank's state in host memory, so that training goes on while the copy is written."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer.checkpoint.states import Key, State, is_plain, key_of, leaves, map_leaves
from trainer.hostmem import available_bytes
from trainer.parallel.tensors import local_tensor
from trainer.words import render_bytes

PINNED_FROM_BYTES = 2**20
"""Larger tensors are pinned one by one; smaller ones lie together in one pinned buffer."""
SHARE_OF_MEMORY = 0.8
"""Of the host memory that is available, what the copies of all ranks of this node may take."""


class Staging:
    """Buffers for one copy of the state, made once by `allocate`; every `copy` overwrites the one before."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._buffers: dict[str, Tensor] = {}
        self._registered: list[int] = []

    def allocate(self, sizes: dict[str, tuple[torch.Size, torch.dtype]]) -> None:
        """Make a buffer for each tensor, pinned on CUDA: seconds for some GB, and the GIL is free meanwhile."""
        for path, (size, dtype) in sizes.items():
            buffer = torch.empty(size, dtype=dtype)
            if self._on_cuda:
                buffer = self._pin(buffer)
            else:
                buffer.zero_()  # have its pages now
            self._buffers[path] = buffer

    def copy(self, state: State) -> tuple[State, Callable[[], None]]:
        """The state with every tensor copied, and a function that waits until the copies are there.

        Returns once the copies are under way, in order with the device's other work: what changes a tensor later
        comes later.
        """
        done: dict[Key, Tensor] = {}  # tied tensors once

        def staged(path: str, leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return copy.deepcopy(leaf)
            local = local_tensor(leaf).detach()
            if key_of(local) not in done:
                done[key_of(local)] = self._copied(path, local)
            mine = done[key_of(local)]
            return DTensor(mine, leaf._spec, requires_grad=False) if isinstance(leaf, DTensor) else mine

        copied = map_leaves(staged, state)
        if not self._on_cuda:
            return copied, lambda: None
        event = torch.cuda.Event()
        event.record()
        return copied, event.synchronize

    def close(self) -> None:
        """Give the buffers back; no copy may be in use any more."""
        for pointer in self._registered:
            torch.cuda.cudart().cudaHostUnregister(pointer)
        self._registered.clear()
        self._buffers.clear()

    def _copied(self, path: str, local: Tensor) -> Tensor:
        if not is_plain(local):  # e.g. 8-bit optimizer state, which is several tensors in one
            return copy_of(local)
        buffer = self._buffers.get(path)
        if buffer is None or buffer.shape != local.shape or buffer.dtype != local.dtype:
            buffer = torch.empty(local.shape, dtype=local.dtype)
        return buffer.copy_(local, non_blocking=True)

    def _pin(self, buffer: Tensor) -> Tensor:
        # torch's own pinned memory is rounded up to a power of two: twice the memory for an unlucky embedding
        size = buffer.numel() * buffer.element_size()
        if size < PINNED_FROM_BYTES:
            return buffer.pin_memory() if size else buffer
        if int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), size, 0)) == 0:
            self._registered.append(buffer.data_ptr())
        return buffer  # not pinned where the system does not let us: the copy is slower, and as right


def copy_of(tensor: Any) -> Tensor:
    """A copy on the CPU, also of one that is several in one: torchao's have no `clone`, and their `cpu` may alias."""
    if is_plain(tensor):
        return tensor.detach().to("cpu", copy=True)
    names, meta = tensor.__tensor_flatten__()
    parts = {name: copy_of(getattr(tensor, name)) for name in names}
    return type(tensor).__tensor_unflatten__(parts, meta, tensor.shape, tensor.stride())


def sizes_of(state: State) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape and dtype of this rank's part of every tensor, by its path in the state; tied ones once."""
    first: dict[Key, str] = {}
    found = {}
    for path, leaf in leaves(state):
        if not isinstance(leaf, Tensor):
            continue
        local = local_tensor(leaf)
        if is_plain(local) and first.setdefault(key_of(local), path) == path:
            found[path] = local.shape, local.dtype
    return found


def why_no_room(needed: int, *, available: int | None = None, ranks: int | None = None) -> str | None:
    """Why this node's ranks cannot hold a copy of `needed` bytes each; None when they can."""
    available = available_bytes() if available is None else available
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if ranks is None else ranks
    if available is None or needed * ranks <= SHARE_OF_MEMORY * available:
        return None
    return (
        f"{ranks} rank(s) would copy {render_bytes(needed)} each to the host's memory, "
        f"of which {render_bytes(available)} are available"
    )
