"""The two values that data, model, loss and loop exchange."""

from __future__ import annotations

from dataclasses import dataclass

import torch

IGNORE = -100
"""The label of a position that is no target."""


@dataclass(frozen=True)
class Batch:
    """Rows of packed documents, every tensor [B, T] int64.

    `labels[b, t]` is the token to be predicted from position t (already shifted), or IGNORE; the last position of
    every document is IGNORE. `positions` restart at 0 with each document; `doc_ids` differ between documents of one
    row and are -1 on padding.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor
    doc_ids: torch.Tensor

    def pin(self) -> Batch:
        """A copy in pinned memory, from where `to` a GPU does not wait; needs CUDA."""
        return Batch(
            self.input_ids.pin_memory(),
            self.labels.pin_memory(),
            self.positions.pin_memory(),
            self.doc_ids.pin_memory(),
        )

    def to(self, device: torch.device) -> Batch:
        move = {"device": device, "non_blocking": True}
        return Batch(
            self.input_ids.to(**move), self.labels.to(**move), self.positions.to(**move), self.doc_ids.to(**move)
        )

    @property
    def num_targets(self) -> torch.Tensor:
        """How many tokens are predicted, a scalar int64 tensor on the batch's device."""
        return (self.labels != IGNORE).sum()

    @property
    def num_tokens(self) -> torch.Tensor:
        """How many tokens are not padding, a scalar int64 tensor on the batch's device."""
        return (self.doc_ids >= 0).sum()


@dataclass(frozen=True)
class LossSum:
    """A loss before normalisation: the sum over targets, and their number."""

    total: torch.Tensor  # scalar fp32, with gradient
    count: torch.Tensor  # scalar int64
