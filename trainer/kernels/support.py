"""Whether Triton's kernels, and so what torch.compile makes, can run on a device."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

HAS_TRITON = find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton's interpreter runs kernels on CPU tensors: slow, and the same arithmetic."""


_given_up: list[str] = []


def give_up_triton(reason: str) -> None:
    """Run no kernel of Triton's in this process from now on, after one could not be made."""
    _given_up.append(reason)


def why_no_triton(device: torch.device) -> str | None:
    """Why Triton's kernels cannot run there; None when they can."""
    return _given_up[0] if _given_up else _why_not(device)


@cache
def _why_not(device: torch.device) -> str | None:
    if device.type != "cuda":
        return "not on a GPU"
    if not HAS_TRITON:
        return "Triton is not installed"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (7, 0):
        return f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}, and Triton needs 7.0"
    return None


def uses_triton(tensor: Tensor) -> bool:
    """Whether the kernels run for this tensor, or their twins in plain torch."""
    return HAS_TRITON and (INTERPRETED or why_no_triton(tensor.device) is None)
