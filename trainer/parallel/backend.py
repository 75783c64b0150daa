"""What every backend promises, and the simplest one: a single process.

After the backward passes of a step's micro-batches, `.grad` holds the SUM over ranks and micro-batches of the local
losses' gradients. No backend averages; the loop divides once, by the tokens of all ranks.

Order: activation checkpointing, compile, shard. The model is built without storage (meta device), sharded, and given
storage of this rank's share alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainer.dist import Dist
from trainer.models.decoder import Decoder
from trainer.parallel.tensors import DTYPES, dtype_name, local_tensor

if TYPE_CHECKING:
    from trainer.schema import Config

MIB = 2**20


class Backend:
    """One process: nothing is shared, nothing is reduced. The other backends differ where they must."""

    name = "pytorch"

    def __init__(self, config: Config, dist: Dist) -> None:
        self.dist = dist
        self.compute_dtype = DTYPES[config.train.precision]
        self.reduce_dtype = DTYPES[config.parallel.reduce_dtype]
        self.options = config.parallel
        self.module: nn.Module = nn.Identity()

    def prepare(self, decoder: Decoder) -> nn.Module:
        """The wrapped model on this rank's device, its parameters allocated and undefined; `decoder` is on meta.

        Fill them with `trainer.models.hf.load_pretrained` or `init_random`. Calls take a Decoder's arguments.
        """
        for block in decoder.blocks:
            block.recompute = self.options.activation_checkpointing == "full"
            if self.options.compile:
                # of the forward alone: FSDP's hooks stay outside the compiled region, and no name gets a prefix
                block.forward = torch.compile(block.forward)
        self.module = self._spread(decoder)
        return self.module

    def sync(self, last: bool) -> None:
        """Say, before its forward, whether the coming micro-batch is the step's last: gradients are reduced then."""

    def scale_grads(self, factor: Tensor) -> None:
        """Multiply every gradient by a scalar tensor on the device, without waiting for its value."""
        grads = [local_tensor(grad) for grad in self._grads()]
        if grads:
            torch._foreach_mul_(grads, factor.to(grads[0].dtype))

    def clip(self, max_norm: float) -> Tensor:
        """The global L2 norm of the gradients, a plain fp32 scalar equal on all ranks, from before they are clipped.

        Gradients are scaled so that the norm is at most `max_norm`; 0 leaves them. A non-finite gradient gives a
        non-finite norm and, when clipping, non-finite gradients.
        """
        norm = torch.nn.utils.get_total_norm(self._grads())
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if max_norm > 0:
            self.scale_grads(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm

    def describe(self) -> str:
        """The plan in a few lines: what is wrapped, in which dtypes, and this rank's bytes."""
        local = sum(local_tensor(parameter).numel() for parameter in self.module.parameters())
        total = sum(parameter.numel() for parameter in self.module.parameters())
        mib = 4 * local / MIB
        return (
            f"{self.name}, {self.dist.world_size} rank(s) on {self.dist.device.type}: {total:,} parameters;"
            f" fp32 storage, products in {dtype_name(self.compute_dtype)}; {self._groups()}\n"
            f"this rank: {local:,} parameters, {mib:.1f} MiB, gradients {mib:.1f} MiB, AdamW state {2 * mib:.1f} MiB;"
            f" activation checkpointing {self.options.activation_checkpointing},"
            f" compile {'on' if self.options.compile else 'off'}"
        )

    def _spread(self, decoder: Decoder) -> nn.Module:
        return self._allocate(decoder)

    def _allocate(self, decoder: Decoder) -> Decoder:
        decoder.to_empty(device=self.dist.device)
        decoder.reset_buffers(self.dist.device)
        return decoder

    def _groups(self) -> str:
        return "no reduction"

    def _grads(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]
