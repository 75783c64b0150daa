"""How a model is spread over the ranks: one process, DistributedDataParallel, or FSDP2.

All three keep the same promise: after the backward passes of a step's micro-batches, `.grad` holds the SUM over ranks
and micro-batches of the local losses' gradients. None averages; the loop divides once, by the tokens of all ranks.

Order: activation checkpointing, compile, shard. The model is built without storage (meta device), sharded, and given
storage of this rank's share alone.
"""

# Without `from __future__ import annotations`: DDP wants the annotations of its communication hook as classes.

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from trainer.dist import Dist, DistError, ensure_group
from trainer.models.decoder import Decoder

if TYPE_CHECKING:
    from trainer.schema import Config

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
MIB = 2**20


def make_backend(config: "Config", dist: Dist) -> "Backend":
    """The backend that `target.train_backend` names; `auto` is pytorch in a world of one, else fsdp."""
    name = config.target.train_backend
    if name == "auto":
        name = "pytorch" if dist.world_size == 1 else "fsdp"
    if name == "pytorch" and dist.world_size > 1:
        raise DistError(
            f"target.train_backend=pytorch is for one process, and {dist.world_size} ranks are running;"
            " use ddp or fsdp, or name one GPU in target.gpu_ranks"
        )
    return {"pytorch": Backend, "ddp": DDPBackend, "fsdp": FSDPBackend}[name](config, dist)


class Backend:
    """One process: nothing is shared, nothing is reduced. The other backends differ where they must."""

    name = "pytorch"

    def __init__(self, config: "Config", dist: Dist) -> None:
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
            f" fp32 storage, products in {_dtype_name(self.compute_dtype)}; {self._groups()}\n"
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


class DDPBackend(Backend):
    """Every rank holds the whole model; gradients are all-reduced during the last micro-batch's backward pass."""

    name = "ddp"

    def _spread(self, decoder: Decoder) -> nn.Module:
        ensure_group(self.dist)
        # init_sync would broadcast parameters that are not filled yet
        ddp = DistributedDataParallel(self._allocate(decoder), gradient_as_bucket_view=True, init_sync=False)
        ddp.register_comm_hook(self.reduce_dtype, _sum_bucket)
        return ddp

    def sync(self, last: bool) -> None:
        self.module.require_backward_grad_sync = last  # what DDP.no_sync() sets, without a context to hold open

    def _groups(self) -> str:
        return f"gradients summed in {_dtype_name(self.reduce_dtype)}, one all-reduce per bucket and step"


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
            f" gathered in {_dtype_name(self.compute_dtype)}, gradients summed in {_dtype_name(self.reduce_dtype)}"
        )


def fsdp_modules(module: nn.Module) -> Iterable[FSDPModule]:
    """The modules in `module`, itself included, that are FSDP groups."""
    return (child for child in module.modules() if isinstance(child, FSDPModule))


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's share of a sharded tensor; a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _sum_bucket(dtype: torch.dtype, bucket: torch_dist.GradBucket) -> torch.futures.Future[Tensor]:
    """A DDP communication hook: the sum over ranks in `dtype`, where DDP's own hook averages."""
    buffer = bucket.buffer()
    sent = buffer.to(dtype)
    future = torch_dist.all_reduce(sent, async_op=True).get_future()

    def give_back(done: torch.futures.Future[list[Tensor]]) -> Tensor:
        summed = done.value()[0]
        return buffer if summed is buffer else buffer.copy_(summed)

    return future.then(give_back)


def _dtype_name(dtype: torch.dtype) -> str:
    return next(name for name, value in DTYPES.items() if value == dtype)
