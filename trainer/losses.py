"""Loss functions: a model and a batch in, a LossSum (sum, count) out. Dividing is the loop's business alone.

Shapes: N positions of a micro-batch, D hidden, V vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.batch import IGNORE, Batch, LossSum

CHUNK_TOKENS = 1024
"""Positions whose logits exist at a time: 1024 of a 152k vocabulary are 0.6 GiB in fp32."""


def sft_loss(model: nn.Module, batch: Batch, *, packed: bool = True, chunk: int = CHUNK_TOKENS) -> LossSum:
    """The summed cross entropy of a batch's targets; a batch without targets gives 0 with gradients of 0.

    `model` is a Decoder, also wrapped or sharded by a backend. `packed=False` is allowed when every row is a single
    document (see Decoder.forward).
    """
    head = partial(chunked_cross_entropy, labels=batch.labels, chunk=chunk)
    total = model(batch.input_ids, batch.positions, batch.doc_ids, packed=packed, head=head)
    return LossSum(total, batch.num_targets)


def chunked_cross_entropy(hidden: Tensor, weight: Tensor, *, labels: Tensor, chunk: int = CHUNK_TOKENS) -> Tensor:
    """The sum over all targets of -log softmax(hidden @ weight.T)[label], scalar fp32.

    Never more than `chunk` positions' logits exist. hidden [..., D], weight [V, D], labels [...] with IGNORE. Products
    are in hidden's dtype, softmax and sums in fp32.
    """
    rows, targets = hidden.flatten(0, -2), labels.flatten()
    if torch.is_grad_enabled() and (rows.requires_grad or weight.requires_grad):
        return _ChunkedCrossEntropy.apply(rows, weight, targets, chunk)
    return _sum_without_grad(rows, weight, targets, chunk)


def _sum_without_grad(rows: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
    total = torch.zeros((), dtype=torch.float32, device=rows.device)
    weight = weight.to(rows.dtype)
    for part, labels in zip(rows.split(chunk), targets.split(chunk), strict=True):
        logits = F.linear(part, weight).float()
        total += F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")
    return total


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Loss and gradients in one pass over the chunks: no recomputation, and the weight's gradient is summed in fp32.

    The gradients are those of the sum, so the backward pass only multiplies by the incoming scalar (as in
    Liger Kernel, arXiv 2410.10989, section 3.2).
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
        needs_rows, needs_weight = ctx.needs_input_grad[:2]
        weight_dtype, weight = weight.dtype, weight.to(rows.dtype)
        total = torch.zeros((), dtype=torch.float32, device=rows.device)
        grad_rows = torch.empty_like(rows) if needs_rows else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        for start in range(0, rows.shape[0], chunk):
            part, labels = rows[start : start + chunk], targets[start : start + chunk]
            loss, grad_logits = _loss_and_grad(F.linear(part, weight), labels)
            total += loss
            if grad_rows is not None:
                torch.mm(grad_logits, weight, out=grad_rows[start : start + chunk])
            if grad_weight is not None:
                grad_weight += grad_logits.T @ part
        ctx.save_for_backward(grad_rows, None if grad_weight is None else grad_weight.to(weight_dtype))
        return total

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor | None, ...]:
        grads = (None if grad is None else grad * grad_total.to(grad.dtype) for grad in ctx.saved_tensors)
        return (*grads, None, None)


def _loss_and_grad(logits_nv: Tensor, labels_n: Tensor) -> tuple[Tensor, Tensor]:
    """The chunk's summed loss, and its gradient to the logits in their dtype."""
    is_target = labels_n != IGNORE
    index = labels_n.where(is_target, 0).unsqueeze(1)
    logprobs = logits_nv.log_softmax(-1, dtype=torch.float32)
    loss = -logprobs.gather(1, index).squeeze(1).where(is_target, 0.0).sum()
    grad = logprobs.exp_()
    grad.scatter_add_(1, index, torch.full_like(index, -1, dtype=grad.dtype))
    return loss, grad.masked_fill_(~is_target.unsqueeze(1), 0.0).to(logits_nv.dtype)
