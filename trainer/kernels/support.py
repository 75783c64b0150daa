"""Whether Triton's kernels, and therefore torch.compile's, can run on a device."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

HAS_TRITON = find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton's interpreter runs kernels on CPU tensors: slowly, with the same arithmetic."""


_given_up: list[str] = []


def give_up_triton(reason: str) -> None:
    """Run no Triton kernel in this process from now on, because one could not be compiled."""
    _given_up.append(reason)


def why_no_triton(device: torch.device) -> str | None:
    """Why Triton's kernels cannot run on the device; None if they can."""
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
    """Whether this tensor goes through the kernels, and not through the plain torch code."""
    return HAS_TRITON and (INTERPRETED or why_no_triton(tensor.device) is None)
