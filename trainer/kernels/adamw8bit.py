"""AdamW over torchao's 8-bit moments: one pass over each parameter reads, updates and writes everything.

A moment is torchao's OptimState8bit: `codes` [of the parameter's shape, uint8], `scale` [values / 128, fp32] and `qmap`
[256, fp32], the sorted values of the codes. The kernel follows its rule for the nearest code, including ties.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainer.kernels.support import HAS_TRITON, uses_triton

if HAS_TRITON:
    from trainer.kernels import triton_adamw8bit as kernels

BLOCK = 128
"""Values that share a scale."""
ROWS = 8
"""Blocks that one program updates."""


@torch.no_grad()
def adamw8bit_(
    parameters: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Any],
    exp_avg_sqs: Sequence[Any],
    steps: Sequence[Tensor],
    *,
    lr: Tensor,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    found_inf: Tensor,
    grad_scale: Tensor | None = None,
) -> None:
    """One AdamW step of fp32 parameters, in place, on one device; decoupled decay, as in torch.optim.AdamW.

    `steps`: fp32 scalars, the number of steps including this one. `lr`: a scalar on the host. `found_inf`: if it is 1,
    no bit of parameters and moments changes. `grad_scale`: the divisor of gradients. The host waits for neither.
    """
    if not parameters:
        return
    one, two = _corrections(steps, beta1), _corrections(steps, beta2).sqrt()
    each = zip(parameters, grads, exp_avgs, exp_avg_sqs, strict=True)
    if not uses_triton(parameters[0]):
        for (parameter, grad, exp_avg, exp_avg_sq), first, second in zip(each, one, two, strict=True):
            step_in_torch_(
                parameter,
                grad if grad_scale is None else grad / grad_scale,
                exp_avg,
                exp_avg_sq,
                first,
                second,
                lr=lr,
                beta1=beta1,
                beta2=beta2,
                weight_decay=weight_decay,
                eps=eps,
                skip=found_inf.bool(),
            )
        return
    rates = [lr.item() / one, 1.0 / two]
    rates_n4 = torch.stack(rates * 2, dim=1)  # rows of 16 bytes: Triton compiles another kernel for unaligned pointers
    divisor = torch.ones_like(found_inf) if grad_scale is None else grad_scale
    decay = lr.item() * weight_decay
    for index, (parameter, grad, exp_avg, exp_avg_sq) in enumerate(each):
        blocks = exp_avg.scale.numel()
        assert parameter.is_contiguous() and blocks * BLOCK == parameter.numel()
        moments = (exp_avg.codes, exp_avg.scale, exp_avg.qmap, exp_avg_sq.codes, exp_avg_sq.scale, exp_avg_sq.qmap)
        tensors = (parameter, grad.contiguous(), *moments, rates_n4[index], found_inf, divisor)
        numbers = (decay, 1.0 - beta1, 1.0 - beta2, eps, blocks)
        kernels.step[(-(-blocks // ROWS),)](*tensors, *numbers, BLOCK=BLOCK, ROWS=ROWS, num_warps=4)


def step_in_torch_(
    parameter: Tensor,
    grad: Tensor,
    exp_avg: Any,
    exp_avg_sq: Any,
    correction1: Tensor,
    correction2_sqrt: Tensor,
    *,
    lr: Tensor,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    skip: Tensor,
) -> None:
    """The same as the kernel, in torchao's arithmetic. A moment may also be a plain fp32 tensor."""
    values = [parameter, *_stored(exp_avg), *_stored(exp_avg_sq)]
    before = [value.clone() for value in values]
    first = _plain(exp_avg).lerp(grad, 1 - beta1)
    second = _plain(exp_avg_sq).lerp(grad.square(), 1 - beta2)
    exp_avg.copy_(first)  # quantises if it is 8-bit
    exp_avg_sq.copy_(second)
    decayed = parameter - lr * weight_decay * parameter
    parameter.copy_(decayed - lr * (first / correction1) / (second.sqrt() / correction2_sqrt + eps))
    for value, old in zip(values, before, strict=True):
        value.copy_(torch.where(skip, old, value))


def _corrections(steps: Sequence[Tensor], beta: float) -> Tensor:
    return 1 - beta ** torch.stack(list(steps))


def _stored(moment: Any) -> list[Tensor]:
    return [moment.codes, moment.scale] if hasattr(moment, "codes") else [moment]


def _plain(moment: Any) -> Tensor:
    plain: Tensor = moment.dequantize() if hasattr(moment, "codes") else moment
    return plain
