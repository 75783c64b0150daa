"""The kernel of 8-bit AdamW against torchao's own step and torchao's own rule for codes.

Run on CPU tensors by tests.trainer.models.kernel_check, in Triton's interpreter, on a GPU by gpu/test_adamw8bit.py.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torchao.optim import AdamW8bit
from torchao.optim.quant_utils import quantize_8bit_with_qmap
from torchao.optim.subclass_8bit import get_qmap_signed, get_qmap_unsigned

from trainer.kernels.adamw8bit import adamw8bit_
from trainer.kernels.triton_adamw8bit import nearest_code

RATES = {"beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-8}
LR = torch.tensor(1e-2)
SHAPE = (67, 256)  # 134 blocks, which a program's 8 do not divide


@triton.jit
def code_all(x_ptr, codes_ptr, qmap_ptr, size, SIGNED: tl.constexpr, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + places, mask=places < size, other=0.0)
    tl.store(codes_ptr + places, nearest_code(x, qmap_ptr, SIGNED).to(tl.uint8), mask=places < size)


def wrong_codes(*, signed: bool, device: str) -> int:
    """How many codes are not torchao's: at every value of the map, at every middle, beside them, and all along."""
    qmap = torch.tensor(get_qmap_signed() if signed else get_qmap_unsigned())
    exact = torch.cat([qmap, (qmap[1:] + qmap[:-1]) / 2])
    beside = [torch.nextafter(exact, torch.tensor(end)) for end in (-2.0, 2.0)]
    small = 10 ** torch.linspace(-9, 0, 20001)
    x = torch.cat([exact, *beside, small, -small, torch.linspace(-1, 1, 20001)]).clamp(-1.0 if signed else 0.0, 1.0)
    x, qmap = x.to(device), qmap.to(device)
    codes = torch.empty(len(x), dtype=torch.uint8, device=device)
    block = 65536 if device == "cpu" else 1024  # the interpreter runs one program after the other
    code_all[(-(-len(x) // block),)](x, codes, qmap, len(x), SIGNED=signed, BLOCK=block)
    return int((codes != quantize_8bit_with_qmap(x, qmap)).sum())


def parts(parameter: Tensor, state: dict[str, Any]) -> list[Tensor]:
    moments = [state["exp_avg"], state["exp_avg_sq"]]
    return [parameter.detach(), *(part for moment in moments for part in (moment.codes, moment.scale))]


def stepped(parameter: Tensor, grad: Tensor, state: dict[str, Any], **scalars: Tensor | None) -> list[Tensor]:
    """What the kernel writes in one step, into a copy."""
    new = [part.clone() for part in parts(parameter, state)]
    first, second = state["exp_avg"], state["exp_avg_sq"]
    first = type(first)(*new[1:3], first.qmap, first.signed)
    second = type(second)(*new[3:5], second.qmap, second.signed)
    steps = [state["step"].to(parameter.device) + 1]  # torchao counts on the host
    adamw8bit_(new[:1], [grad], [first], [second], steps, lr=LR, **RATES, **scalars)
    return new


def check_adamw8bit(device: str) -> dict[str, Any]:
    """One step from the state that torchao has after three, by the kernel and by torchao."""
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(0.1 * torch.randn(SHAPE, device=device))
    no, yes = torch.zeros((), device=device), torch.ones((), device=device)
    settings = {"weight_decay": RATES["weight_decay"], "eps": RATES["eps"], "block_size": 128}
    theirs = AdamW8bit([parameter], lr=LR.item(), betas=(RATES["beta1"], RATES["beta2"]), **settings)
    grads = torch.randn(4, *SHAPE) * 10 ** torch.linspace(-6, 2, SHAPE[0]).unsqueeze(1)
    grads = grads.to(device)
    with torch.compiler.set_stance("force_eager"):
        for grad in grads[:3]:
            parameter.grad = grad
            theirs.step()
        state = theirs.state[parameter]
        old = [part.clone() for part in parts(parameter, state)]
        mine = stepped(parameter, grads[3], state, found_inf=no, grad_scale=None)
        divided = stepped(parameter, grads[3] * 8, state, found_inf=no, grad_scale=8 * yes)
        skipped = stepped(parameter, grads[3] * float("nan"), state, found_inf=yes, grad_scale=None)
        parameter.grad = grads[3]
        theirs.step()
    expected = parts(parameter, state)
    codes = torch.cat([(mine[at].int() - expected[at].int()).abs().flatten() for at in (1, 3)])
    return {
        "wrong codes": sum(wrong_codes(signed=signed, device=device) for signed in (True, False)),
        "parameters": (mine[0] - expected[0]).abs().max().item(),
        "moved": (mine[0] - old[0]).abs().mean().item(),
        "codes": codes.max().item(),
        "other codes": (codes > 0).float().mean().item(),
        "scales": max((mine[at] / expected[at] - 1).abs().max().item() for at in (2, 4)),
        "divided": all(map(torch.equal, divided, mine)),
        "skipped": all(map(torch.equal, skipped, old)),
    }
