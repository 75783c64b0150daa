"""Helpers for sharded tensors and for the modules that shard them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def fsdp_modules(module: nn.Module) -> Iterable[FSDPModule]:
    """The modules in `module`, itself included, that are FSDP groups."""
    return (child for child in module.modules() if isinstance(child, FSDPModule))


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor: the same memory, outside any autograd graph. A plain tensor unchanged."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():  # else torch adds a node to the graph
        return tensor.to_local()


def own_slices(parameter: Tensor) -> tuple[slice, ...]:
    """The region of the full tensor that this rank stores."""
    shape, offset = tuple(parameter.shape), (0,) * parameter.dim()
    if isinstance(parameter, DTensor):
        shape, offset = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
    return tuple(slice(start, start + length) for start, length in zip(offset, shape, strict=True))
