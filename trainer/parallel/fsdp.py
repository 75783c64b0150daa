"""Parameters, gradients and optimizer state are sharded over the ranks by FSDP2."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from trainer.dist import ensure_group
from trainer.models.decoder import Decoder
from trainer.parallel.backend import Backend
from trainer.parallel.tensors import dtype_name, fsdp_modules


class FSDPBackend(Backend):
    """Parameters, gradients and optimizer state are sharded; each block is a group, the root group holds the rest.

    Embedding, final norm and head are in the root group together, so a tied matrix is gathered once for both its uses.
    """

    name = "fsdp"

    def _spread(self, decoder: Decoder) -> nn.Module:
        ensure_group(self.dist)
        mesh = init_device_mesh(self.dist.device.type, (self.dist.world_size,), mesh_dim_names=("dp_shard",))
        policy = MixedPrecisionPolicy(
            param_dtype=None if self.compute_dtype == torch.float32 else self.compute_dtype,
            reduce_dtype=self.reduce_dtype,
            cast_forward_inputs=False,  # the rotary tables stay fp32
        )
        for block in decoder.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=self.options.reshard_after_forward)
        fully_shard(decoder, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        for module in fsdp_modules(decoder):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum, and none is needed
        return self._allocate(decoder)

    def sync(self, last: bool) -> None:
        self.module.set_requires_gradient_sync(last)
        self.module.set_is_last_backward(last)

    def _groups(self) -> str:
        blocks = list(self.module.blocks)
        in_blocks = sum(parameter.numel() for block in blocks for parameter in block.parameters())
        in_root = sum(parameter.numel() for parameter in self.module.parameters()) - in_blocks
        freed = "freed" if self.options.reshard_after_forward else "kept"
        return (
            f"{len(blocks)} block groups of {in_blocks // len(blocks):,} ({freed} after forward)"
            f" and a root group of {in_root:,},"
            f" gathered in {dtype_name(self.compute_dtype)}, gradients summed in {dtype_name(self.reduce_dtype)}"
        )
