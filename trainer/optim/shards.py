"""torch's AdamW on what this rank holds of each sharded parameter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainer.parallel.tensors import local_tensor


class ShardAdamW(torch.optim.AdamW):
    """Its state is sharded as the parameters are; its step sees this rank's shards as plain tensors.

    An update needs nothing of other ranks. Among DTensors torch makes a DTensorSpec for each parameter's step count
    anew, milliseconds of the host, and torch 2.11 keeps them all (https://github.com/pytorch/pytorch/issues/188174).
    """

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        has_complex: bool = super()._init_group(group, *lists)  # type: ignore[no-untyped-call]
        for tensors in lists:
            tensors[:] = [local_tensor(tensor) for tensor in tensors]
        return has_complex
