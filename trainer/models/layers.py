"""The parts of decoders: products with hooks for adapters and float8, the norm, and the output head.

Every `Linear` in a model's blocks can have an adapter (`models.lora`) and multiply in float8 (`models.float8`).

Shapes: B rows, T positions, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Linear):
    """A product in the input's dtype; parameters of another dtype are cast."""

    adapter: Callable[[Tensor, Tensor], Tensor] | None = None
    """Computes the output from the input and the product. Not a module, so that no name changes (`models.lora`)."""
    product: Callable[[Tensor, Tensor, Tensor | None], Tensor] = staticmethod(F.linear)
    """The product of input, weight and bias, all in one dtype; `models.float8` replaces it."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return self.adapted(x, self.product(x, self.weight.to(x.dtype), bias))

    def adapted(self, x: Tensor, out: Tensor) -> Tensor:
        return out if self.adapter is None else self.adapter(x, out)


def products(x: Tensor, linears: Sequence[Linear]) -> list[Tensor]:
    """The outputs of the linear modules for the same input; computed in one product if that needs no copy.

    Storage keeps Hugging Face's names. If a compiled block casts the weights anyway (fp32 parameters, bf16 products),
    the compiler writes the casts into one matrix. Gathered weights (FSDP) and stored bf16 weights would have to be
    copied for it. Only for queries, keys and values: one product for gate and up makes a step of 0.5B 4 % longer,
    because the kernel of their gradients then computes each branch for both (H200, torch 2.11).
    """
    if not torch.compiler.is_compiling() or any(linear.weight.dtype == x.dtype for linear in linears):
        return [linear(x) for linear in linears]
    weight = torch.cat([linear.weight.to(x.dtype) for linear in linears])
    biases = [linear.bias.to(x.dtype) for linear in linears if linear.bias is not None]
    out = linears[0].product(x, weight, torch.cat(biases) if biases else None)
    outs = out.split([m.out_features for m in linears], dim=-1)
    return [m.adapted(x, out) for m, out in zip(linears, outs, strict=True)]


class RMSNorm(nn.Module):
    """Root-mean-square norm: statistics in fp32, result in the input's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight.to(x.dtype) * normed.to(x.dtype)


def logits_head(hidden: Tensor, head_weight: Tensor) -> Tensor:
    """A `head` for `Model.forward`: fp32 logits [B, T, V] of every position."""
    return F.linear(hidden, head_weight.to(hidden.dtype)).float()


class Head(Linear):
    """The output head of an untied model. The loss runs inside its forward, for which FSDP gathers its weight."""

    def forward(self, hidden: Tensor, head: Callable[[Tensor, Tensor], Any] = logits_head) -> Any:
        return head(hidden, self.weight)
