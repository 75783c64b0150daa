"""Every rank holds the whole model; gradients are summed over the ranks."""

# No `from __future__ import annotations`: DDP requires its communication hook's annotations to be classes.

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainer.dist import ensure_group
from trainer.models.protocol import Model
from trainer.parallel.backend import Backend


class DDPBackend(Backend):
    """Each rank holds the whole model; gradients are all-reduced during the last micro-batch's backward pass."""

    name = "ddp"

    def _spread(self, model: Model) -> nn.Module:
        ensure_group(self.dist)
        # init_sync would broadcast parameters that are not filled yet
        ddp = DistributedDataParallel(self._allocate(model), gradient_as_bucket_view=True, init_sync=False)
        ddp.register_comm_hook(self.reduce_dtype, _sum_bucket)
        return ddp

    def sync(self, last: bool) -> None:
        assert isinstance(self.module, DistributedDataParallel)
        self.module.require_backward_grad_sync = last  # as DDP.no_sync() sets it, but without a context manager


def _sum_bucket(dtype: torch.dtype, bucket: torch_dist.GradBucket) -> torch.futures.Future[Tensor]:
    """A DDP communication hook that sums over ranks in `dtype`; DDP's own hook averages."""
    buffer = bucket.buffer()
    sent = buffer.to(dtype)
    future = torch_dist.all_reduce(sent, async_op=True).get_future()

    def give_back(done: torch.futures.Future[list[Tensor]]) -> Tensor:
        summed = done.value()[0]
        return buffer if summed is buffer else buffer.copy_(summed)

    reduced: torch.futures.Future[Tensor] = future.then(give_back)
    return reduced
