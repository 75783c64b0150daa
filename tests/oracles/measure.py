"""What an oracle is: a quantity of ours, code nobody here wrote that computes it too, and how far apart they may be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


@dataclass(frozen=True)
class Measured:
    """One comparison as it came out."""

    name: str
    oracle: str
    input: str
    tolerance: float
    difference: float

    @property
    def holds(self) -> bool:
        return self.difference <= self.tolerance  # False for NaN


@dataclass(frozen=True)
class Oracle:
    """A comparison that can be computed: `difference(folder)` gets an empty folder of its own to write into."""

    name: str
    """What of ours is compared, and in which unit."""
    oracle: str
    input: str
    tolerance: float
    difference: Callable[[Path], float]

    def measure(self, folder: Path) -> Measured:
        return Measured(self.name, self.oracle, self.input, self.tolerance, self.difference(folder))


def largest_difference(got: Tensor, expected: Tensor) -> float:
    """The largest absolute difference of two tensors of one shape; NaN when either has one."""
    if got.shape != expected.shape:
        raise ValueError(f"shapes differ: {tuple(got.shape)} and {tuple(expected.shape)}")
    return (got - expected).abs().max().item()


def scaled_difference(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest difference of tensors of one name, as a share of that tensor's largest entry."""
    if got.keys() != expected.keys():
        raise ValueError(f"names differ: {sorted(got.keys() ^ expected.keys())}")
    scaled = (largest_difference(got[name], tensor) / tensor.abs().max().item() for name, tensor in expected.items())
    return worst(scaled)


def series_difference(got: Iterable[float], expected: Iterable[float], *, relative: bool = False) -> float:
    """The largest difference between two series of the same length."""
    ours, theirs = (torch.tensor(list(series), dtype=torch.float64) for series in (got, expected))
    if relative:
        return largest_difference(ours / theirs, torch.ones_like(theirs))
    return largest_difference(ours, theirs)


def worst(differences: Iterable[float]) -> float:
    """The largest, and NaN when one of them is (which `max` would lose)."""
    return torch.tensor(list(differences), dtype=torch.float64).max().item()
