"""Softmax cross entropy and its gradient, in place in a chunk of logits: without a second matrix, or one in fp32.

Shapes: N positions, V vocabulary. Softmax and loss are fp32 for any dtype of the logits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.batch import IGNORE
from trainer.kernels.support import HAS_TRITON, uses_triton

if HAS_TRITON:
    from trainer.kernels import triton_cross_entropy as kernels

BLOCK = 8192
"""Columns that a program holds at the same time."""


def softmax_gradient_(logits_nv: Tensor, labels_n: Tensor) -> Tensor:
    """Turn logits into the gradient of their summed cross entropy, in place; returns that sum, a fp32 scalar.

    A position labelled IGNORE adds no loss and gets a gradient of zeros. A non-finite logit gives a non-finite sum.
    """
    if not uses_triton(logits_nv):
        return softmax_gradient_in_torch_(logits_nv, labels_n)
    losses_n = torch.empty(logits_nv.shape[0], dtype=torch.float32, device=logits_nv.device)
    if len(losses_n):
        arguments: tuple[Any, ...] = (logits_nv, labels_n, losses_n, logits_nv.stride(0), logits_nv.shape[1], IGNORE)
        kernels.softmax_gradient[(len(losses_n),)](*arguments, BLOCK=BLOCK, num_warps=16)
    return losses_n.sum()


def softmax_gradient_in_torch_(logits_nv: Tensor, labels_n: Tensor) -> Tensor:
    """The same as the kernel, in plain torch."""
    is_target = labels_n != IGNORE
    index = labels_n.where(is_target, 0).unsqueeze(1)
    logprobs = logits_nv.log_softmax(-1, dtype=torch.float32)
    loss = -logprobs.gather(1, index).squeeze(1).where(is_target, 0.0).sum()
    grad = logprobs.exp_()
    grad.scatter_add_(1, index, torch.full_like(index, -1, dtype=grad.dtype))
    logits_nv.copy_(grad.masked_fill_(~is_target.unsqueeze(1), 0.0))
    return loss


def cross_entropy_sum(logits_nv: Tensor, labels_n: Tensor) -> Tensor:
    """Only the summed cross entropy, a fp32 scalar; may overwrite the logits."""
    if uses_triton(logits_nv):
        return softmax_gradient_(logits_nv, labels_n)
    return F.cross_entropy(logits_nv.float(), labels_n, ignore_index=IGNORE, reduction="sum")


def scale_(tensor: Tensor, factor: Tensor) -> Tensor:
    """Multiply in place by a scalar on the device. If it is 1, as in a training step, the tensor is not touched."""
    if not (uses_triton(tensor) and tensor.is_contiguous()):
        return tensor.mul_(factor.to(tensor.dtype))
    size = tensor.numel()
    if size:
        kernels.scale[(-(-size // BLOCK),)](tensor, factor, size, BLOCK=BLOCK)
    return tensor
