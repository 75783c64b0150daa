"""Documents of token files in pieces that fit a row, without a copy of any token.

Pieces of one document overlap by a token: the last one of a piece, which is predicted there, is what the next piece
begins with. So every token of a document but its first is a target exactly once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainer.data.tokenize.chat import Encoded
from trainer.data.tokenize.token_file import TokenFile


@dataclass(frozen=True)
class Pieces:
    """Where each piece lies; all arrays are [pieces] int64."""

    document: np.ndarray
    start: np.ndarray
    """Its first token in the document."""
    length: np.ndarray


def cut_documents(lengths: np.ndarray, *, seq_len: int) -> Pieces:
    """Documents of `lengths` [docs] tokens in pieces of `seq_len` tokens, the last of each shorter; in order.

    Documents of fewer than two tokens have no piece, for nothing in them can be predicted.
    """
    step = seq_len - 1
    counts = np.maximum(-(-(lengths - 1) // step), 0)
    document = np.repeat(np.arange(len(lengths)), counts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    start = number * step
    return Pieces(document, start, np.minimum(lengths[document] - start, seq_len))


class PieceStore:
    """The pieces of all documents of some token files, one file after another; a `trainer.data.dataset.store.Store`."""

    def __init__(self, files: Sequence[TokenFile], *, seq_len: int) -> None:
        self._files = list(files)
        self._seq_len = seq_len
        counts = [len(file) for file in files]
        self._first_document = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        lengths = np.concatenate([file.lengths for file in files]) if files else np.zeros(0, np.int64)
        self.pieces = cut_documents(lengths, seq_len=seq_len)
        """`document` counts over all files."""

    def __len__(self) -> int:
        return len(self.pieces.document)

    @property
    def lengths(self) -> np.ndarray:
        """[pieces] int64, tokens of each."""
        return self.pieces.length

    def __getitem__(self, index: int) -> Encoded:
        file, document = self._place(index)
        begin = int(self.pieces.start[index])
        part = file.part(document, begin, begin + int(self.pieces.length[index]))
        return Encoded(self.name(index), part.ids, part.is_target)

    def name(self, index: int) -> str:
        """`DOCUMENT`, or `DOCUMENT[first:end]` when that has several pieces."""
        file, document = self._place(index)
        begin, length = int(self.pieces.start[index]), int(self.pieces.length[index])
        whole = begin == 0 and length < self._seq_len
        return file.name(document) if whole else f"{file.name(document)}[{begin}:{begin + length}]"

    @property
    def all_targets(self) -> bool:
        """Whether every token but a piece's first is a target."""
        return not any(file.header.has_targets for file in self._files)

    @property
    def fingerprint(self) -> str:
        """Changes with any id, target, name or their order, and with seq_len."""
        parts = [str(self._seq_len), *(file.fingerprint for file in self._files)]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]

    def _place(self, index: int) -> tuple[TokenFile, int]:
        document = int(self.pieces.document[index])
        file = int(np.searchsorted(self._first_document, document, side="right")) - 1
        return self._files[file], document - int(self._first_document[file])
