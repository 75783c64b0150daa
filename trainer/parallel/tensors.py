"""Sharded tensors and the modules that shard them, whatever wraps the model."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def fsdp_modules(module: nn.Module) -> Iterable[FSDPModule]:
    """The modules in `module`, itself included, that are FSDP groups."""
    return (child for child in module.modules() if isinstance(child, FSDPModule))


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's share of a sharded tensor; a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
