"""Rows of a batch as readable text, divided where the label of the tokens changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import torch

from trainer.batch import IGNORE, Batch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Label(str, Enum):
    """The role of a token in the loss."""

    TARGET = "target"
    """Predicted from the tokens before it."""
    CONTEXT = "context"
    """Seen by the model, and masked from the loss."""
    PADDING = "padding"
    """Neither."""


@dataclass(frozen=True)
class Piece:
    """Neighbouring tokens of one document with one label."""

    label: Label
    document: int
    """Counted within the row; -1: padding."""
    tokens: int
    text: str


@dataclass(frozen=True)
class Sample:
    """One row of a batch."""

    pieces: list[Piece]

    def count(self, label: Label) -> int:
        """Tokens with this label."""
        return sum(piece.tokens for piece in self.pieces if piece.label == label)

    @property
    def documents(self) -> int:
        """Number of documents in the row."""
        return len({piece.document for piece in self.pieces if piece.document >= 0})


def read_samples(batches: Sequence[Batch], tokenizer: PreTrainedTokenizerFast, *, count: int) -> list[Sample]:
    """The first `count` rows that hold a document."""
    samples: list[Sample] = []
    for row in _rows(batches):
        if len(samples) == count:
            break
        if bool((row[2] >= 0).any()):
            samples.append(Sample(list(_pieces(*row, tokenizer))))
    return samples


def _rows(batches: Sequence[Batch]) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    for batch in batches:
        yield from zip(batch.input_ids, batch.labels, batch.doc_ids, strict=True)


def _pieces(
    ids: torch.Tensor, labels: torch.Tensor, documents: torch.Tensor, tokenizer: PreTrainedTokenizerFast
) -> Iterator[Piece]:
    kinds = list(zip(_labels(labels, documents), documents.tolist(), strict=True))
    begin = 0
    for end in range(1, len(kinds) + 1):
        if end == len(kinds) or kinds[end] != kinds[begin]:
            label, document = kinds[begin]
            text = (
                "" if label == Label.PADDING else tokenizer.decode(ids[begin:end], clean_up_tokenization_spaces=False)
            )
            assert isinstance(text, str)  # decode returns a list only for several rows
            yield Piece(label, document, end - begin, text)
            begin = end


def _labels(labels: torch.Tensor, documents: torch.Tensor) -> list[Label]:
    """The label of each token; in a Batch, the label of a position is about the next token."""
    is_target = torch.cat([torch.tensor([False]), labels[:-1] != IGNORE]).tolist()
    return [
        Label.PADDING if document < 0 else Label.TARGET if target else Label.CONTEXT
        for target, document in zip(is_target, documents.tolist(), strict=True)
    ]
