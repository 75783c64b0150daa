"""The two values that data, model, loss and loop exchange."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

IGNORE = -100
"""The label of a position that is not a target."""


@dataclass(frozen=True)
class Batch:
    """Rows of packed documents. All tensors except `targets` are [B, T] int64.

    `labels[b, t]` is the token to be predicted from position t (already shifted), or IGNORE; the last position of
    every document is IGNORE. `positions` restart at 0 with each document; `doc_ids` rise along a row and are -1 on the
    padding at its end.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor
    doc_ids: torch.Tensor
    targets: torch.Tensor | None = None
    """[N] int64: the flat indices b·T + t of all positions with a label; the head and its loss are computed only for
    these. They are found on the host, where this does not wait for the device. None: not known."""

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        """Applies `change` to each tensor."""
        return Batch(
            change(self.input_ids),
            change(self.labels),
            change(self.positions),
            change(self.doc_ids),
            None if self.targets is None else change(self.targets),
        )

    def pin(self) -> Batch:
        """A copy in pinned memory, from which `to` copies to a GPU without waiting. Needs CUDA."""
        return self.map(torch.Tensor.pin_memory)

    def to(self, device: torch.device) -> Batch:
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))

    @property
    def num_targets(self) -> torch.Tensor:
        """How many tokens are predicted, a scalar int64 tensor on the batch's device."""
        return (self.labels != IGNORE).sum()

    @property
    def num_tokens(self) -> torch.Tensor:
        """How many tokens are not padding, a scalar int64 tensor on the batch's device."""
        return (self.doc_ids >= 0).sum()

    @property
    def squared_lengths(self) -> torch.Tensor:
        """The sum of the squares of the documents' lengths: attention's operations grow with it. A scalar int64 tensor
        on the batch's device."""
        return torch.where(self.doc_ids >= 0, 2 * self.positions + 1, 0).sum()  # 1 + 3 + … + (2n - 1) = n²


@dataclass(frozen=True)
class LossSum:
    """A loss before normalisation: the sum over targets, and their number."""

    total: torch.Tensor  # scalar fp32, with gradient
    count: torch.Tensor  # scalar int64
    terms: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Further values to record, divided by the same count: scalar sums by name. Every micro-batch of every rank has the
    same names in the same order."""


def add_terms(sums: dict[str, torch.Tensor], terms: Mapping[str, torch.Tensor]) -> None:
    """Add a micro-batch's terms to those before, as float64 scalars without gradient."""
    for name, term in terms.items():
        value = term.detach().double()
        sums[name] = sums[name] + value if name in sums else value
