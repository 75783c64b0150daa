"""Loss functions: a model and a batch in, a LossSum (sum, count) out. Only the training loop divides.

Shapes: N positions of a micro-batch, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.batch import Batch, LossSum
from trainer.kernels.cross_entropy import cross_entropy_sum, scale_, softmax_gradient_
from trainer.kernels.support import uses_triton

CHUNK_TOKENS = 4096
"""Positions whose logits exist at the same time: 4096 of a 152k vocabulary are 1.2 GiB in bf16."""
CHUNK_TOKENS_IN_TORCH = 1024
"""The same without Triton's kernel, where log-probabilities in fp32 exist beside the logits."""


def sft_loss(model: nn.Module, batch: Batch, *, packed: bool = True, chunk: int | None = None) -> LossSum:
    """The summed cross entropy of a batch's targets; a batch without targets gives 0 with gradients of 0.

    `model` is a `trainer.models.protocol.Model`, which a backend may have wrapped or sharded. `packed=False` is allowed
    if every row is a single document (see Model.forward). `chunk`: positions whose logits exist at the same time.
    """
    head = partial(chunked_cross_entropy, labels=batch.labels, targets=batch.targets, chunk=chunk)
    total = model(batch.input_ids, batch.positions, batch.doc_ids, packed=packed, head=head)
    return LossSum(total, batch.num_targets)


def chunked_cross_entropy(
    hidden: Tensor, weight: Tensor, *, labels: Tensor, targets: Tensor | None = None, chunk: int | None = None
) -> Tensor:
    """The sum over all targets of -log softmax(hidden @ weight.T)[label], scalar fp32.

    The logits of at most `chunk` positions exist at the same time. hidden [..., D], weight [V, D], labels [...] with
    IGNORE. Products are in hidden's dtype, softmax and sums in fp32. `targets`: the flat indices of all positions whose
    label is not IGNORE, if known: then only these take part in products.
    """
    chunk = chunk or (CHUNK_TOKENS if uses_triton(hidden) else CHUNK_TOKENS_IN_TORCH)
    rows, flat = hidden.flatten(0, -2), labels.flatten()
    if targets is not None and len(targets) == len(flat):
        targets = None
    if torch.is_grad_enabled() and (rows.requires_grad or weight.requires_grad):
        apply: Callable[..., Tensor] = _ChunkedCrossEntropy.apply
        return apply(rows, weight, flat, targets, chunk)
    weight, total = weight.to(rows.dtype), torch.zeros((), dtype=torch.float32, device=rows.device)
    for part in _parts(rows, targets, chunk):
        total += cross_entropy_sum(F.linear(_taken(rows, part), weight), flat[part])
    return total


Part = slice | Tensor
"""Positions: a range, or indices."""


def _parts(rows: Tensor, targets: Tensor | None, chunk: int) -> Iterator[Part]:
    if targets is not None:
        yield from targets.split(chunk) if len(targets) else ()
    else:
        yield from (slice(start, start + chunk) for start in range(0, rows.shape[0], chunk))


def _taken(rows: Tensor, part: Part) -> Tensor:
    return rows[part] if isinstance(part, slice) else rows.index_select(0, part)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Loss and gradients in one pass over the chunks: no recomputation, and the weight's gradient is summed in fp32.

    The gradients are those of the sum, so the backward pass only multiplies them by the incoming scalar (as in
    Liger Kernel, arXiv 2410.10989, section 3.2).
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, labels: Tensor, targets: Tensor | None, chunk: int) -> Tensor:
        needs_rows, needs_weight = ctx.needs_input_grad[:2]
        weight_dtype, weight = weight.dtype, weight.to(rows.dtype)
        total = torch.zeros((), dtype=torch.float32, device=rows.device)
        new = torch.empty_like if targets is None else torch.zeros_like
        grad_rows = new(rows) if needs_rows else None
        grad_weight = None
        for part in _parts(rows, targets, chunk):
            taken = _taken(rows, part)
            logits = F.linear(taken, weight)
            total += softmax_gradient_(logits, labels[part])
            if grad_rows is not None:
                _put(grad_rows, part, logits, weight)
            if needs_weight:
                grad_weight = _plus_product(grad_weight, logits.T, taken)
        if needs_weight and grad_weight is None:
            grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        ctx.save_for_backward(grad_rows, None if grad_weight is None else grad_weight.to(weight_dtype))
        return total

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor | None, ...]:
        grads = (None if grad is None else scale_(grad, grad_total) for grad in ctx.saved_tensors)
        return (*grads, None, None, None)


def _put(grad_rows: Tensor, part: Part, grad_logits: Tensor, weight: Tensor) -> None:
    if isinstance(part, slice):
        torch.mm(grad_logits, weight, out=grad_rows[part])
    else:
        grad_rows.index_copy_(0, part, grad_logits @ weight)


def _plus_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """A product of low-precision matrices, added in fp32 to `total`; on a GPU within the product's kernel."""
    if not left.is_cuda or left.dtype == torch.float32:
        product = (left @ right).float()
        return product if total is None else total.add_(product)
    if total is None:
        return torch.mm(left, right, out_dtype=torch.float32)
    return torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
