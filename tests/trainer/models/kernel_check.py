"""Run by test_kernels.py with TRITON_INTERPRET=1: the kernels on CPU tensors against their twins in torch.

Prints one JSON object: the largest difference of each case, and what torch's own cross entropy and torchao's 8-bit
AdamW give.
"""

from __future__ import annotations

import json

import torch
import torch.nn.functional as F

from tests.support.adamw8bit_check import check_adamw8bit
from trainer.batch import IGNORE
from trainer.kernels.cross_entropy import scale_, softmax_gradient_, softmax_gradient_in_torch_
from trainer.kernels.support import INTERPRETED, uses_triton

CASES = {"one block": (3, 50), "several blocks": (2, 8192 + 8192 + 7), "no position": (0, 50)}


def compare(rows: int, vocab: int, dtype: torch.dtype) -> dict[str, float]:
    """The largest differences between kernel and twin, and between kernel and autograd through F.cross_entropy."""
    torch.manual_seed(0)
    logits = (4 * torch.randn(rows, vocab)).to(dtype)
    labels = torch.randint(vocab, (rows,))
    labels[1:2] = IGNORE
    leaf = logits.float().requires_grad_()
    expected = F.cross_entropy(leaf, labels, ignore_index=IGNORE, reduction="sum")
    (gradient,) = torch.autograd.grad(expected, leaf)
    mine, twin = logits.clone(), logits.clone()
    losses = softmax_gradient_(mine, labels), softmax_gradient_in_torch_(twin, labels)
    return {
        "loss to twin": abs(losses[0] - losses[1]).item(),
        "loss to torch": abs(losses[0] - expected).item(),
        "gradient to twin": largest(mine.float() - twin.float()),
        "gradient to torch": largest(mine.float() - gradient),
        "ignored": largest(mine[1:2].float()),
    }


def largest(difference: torch.Tensor) -> float:
    return difference.abs().max().item() if difference.numel() else 0.0


def main() -> None:
    assert INTERPRETED and uses_triton(torch.zeros(1))
    found = {
        f"{name}, {str(dtype).removeprefix('torch.')}": compare(*case, dtype)
        for name, case in CASES.items()
        for dtype in (torch.float32, torch.bfloat16)
    }
    bad = torch.tensor([[0.0, float("nan"), 1.0]])
    values = torch.arange(9000.0)
    print(
        json.dumps(
            {
                "cases": found,
                "adamw8bit": check_adamw8bit("cpu"),
                "nan stays": bool(softmax_gradient_(bad, torch.tensor([0])).isnan()),
                "scaled": scale_(values.clone(), torch.tensor(0.5)).equal(values * 0.5),
                "left": scale_(values.clone(), torch.tensor(1.0)).equal(values),
            }
        )
    )


if __name__ == "__main__":
    main()
