"""Products of the blocks in float8, by torchao: each product scales each tensor by the tensor's largest value.

Values and weights are e4m3, gradients e5m2. Sums and results are in bf16 or better; parameters and their names do not
change, nor do embedding, head, norms and adapters (recipe: github.com/pytorch/ao/tree/main/torchao/float8).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from trainer.config.train import MULTIPLE
from trainer.models.layers import Linear
from trainer.models.lora import linear_modules
from trainer.models.protocol import Model

NEEDED = (8, 9)
"""Compute capability of the first cards with float8 products (Ada; Hopper is 9.0)."""


def use_float8(model: Model, *, emulate: bool = False) -> None:
    """Make the projections of each block multiply in float8. `emulate`: round to float8, and multiply in fp32."""
    for _, linear in linear_modules(model):
        linear.product = _float8_product(emulate)


def use_bf16(model: Model) -> None:
    """Undo `use_float8`."""
    for _, linear in linear_modules(model):
        linear.__dict__.pop("product", None)


def uses_float8(model: nn.Module) -> bool:
    """Whether the model, wrapped or not, uses float8 (`use_float8`)."""
    return any("product" in vars(module) for module in model.modules() if isinstance(module, Linear))


def why_not_float8(model: Model, device: torch.device) -> str | None:
    """Why this model cannot use float8 products on this device; None if it can."""
    if device.type != "cuda":
        return "not on a GPU"
    capability = torch.cuda.get_device_capability(device)
    if capability < NEEDED:
        card, (major, minor) = torch.cuda.get_device_name(device), capability
        return f"{card} has compute capability {major}.{minor}, and float8 needs {NEEDED[0]}.{NEEDED[1]}"
    if find_spec("torchao") is None:
        return "torchao is not installed (pip install torchao, the extra `lowbit`)"
    return odd_size(model)


def odd_size(model: Model) -> str | None:
    """A text about the first matrix whose size float8 does not support; None if there is none."""
    for name, linear in linear_modules(model):
        if linear.in_features % MULTIPLE or linear.out_features % MULTIPLE:
            size = f"{linear.out_features} x {linear.in_features}"
            return f"{name} is {size}, and float8 needs multiples of {MULTIPLE}"
    return None


@cache
def _float8_product(emulate: bool) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

    # torchao's module, for its settings; creating it also keeps the compiler from making code that Triton gets wrong
    model = nn.Sequential(nn.Linear(MULTIPLE, MULTIPLE, bias=False, device="meta"))
    module = convert_to_float8_training(model, config=Float8LinearConfig(emulate=emulate))[0]
    products, casts = module.linear_mm_config, module.config

    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out: Tensor = matmul_with_hp_or_float8_args.apply(x, weight.t(), products, casts)
        return out if bias is None else out + bias

    return product
