"""Documents laid into rows of a fixed length, and the labels of each position.

The only place where labels are shifted: the label of a position is the next token of the same document.
Legend: N documents, R rows, T tokens per row (seq_len).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from trainer.batch import IGNORE
from trainer.data.tokenize.chat import Encoded

BUFFER_DOCS = 4096
"""The number of documents that are packed into rows together; groups stay in the order of reading."""

Plan = list[list[int]]
"""Rows, each the indices of its documents in the order in which they stand."""


@dataclass(frozen=True)
class PackedRow:
    """One row, every array [T] int64, as in `trainer.batch.Batch`."""

    input_ids: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    doc_ids: np.ndarray


def plan_rows(lengths: Sequence[int] | np.ndarray, order: Sequence[int], *, seq_len: int, packing: bool) -> Plan:
    """Which documents share a row: best fit, longest first, within each BUFFER_DOCS documents of `order`.

    Every document of `order` is in exactly one row. `lengths[i]` <= seq_len is the length of document i.
    """
    if not packing or not len(order):
        return [[index] for index in order]
    indices = np.asarray(order, dtype=np.int64)
    sizes = np.asarray(lengths, dtype=np.int64)[indices]
    rows: Plan = [[index] for index in indices[sizes >= seq_len].tolist()]  # most of a corpus of long documents
    indices, sizes = indices[sizes < seq_len], sizes[sizes < seq_len]
    for begin in range(0, len(indices), BUFFER_DOCS):
        part = slice(begin, begin + BUFFER_DOCS)
        longest_first = np.argsort(-sizes[part], kind="stable")  # equal lengths keep their order
        rows += _best_fit(sizes[part][longest_first].tolist(), indices[part][longest_first].tolist(), seq_len)
    return rows


def _best_fit(sizes: Sequence[int], indices: Sequence[int], seq_len: int) -> Plan:
    """Documents `indices` of `sizes` tokens, each into the fullest row that has room for it."""
    rows: Plan = []
    room: list[int] = []  # free tokens * BUFFER_DOCS + row of each row that is not full, sorted
    for size, index in zip(sizes, indices, strict=True):
        place = bisect_left(room, size * BUFFER_DOCS)
        if place < len(room):
            free, row = divmod(room.pop(place), BUFFER_DOCS)
            rows[row].append(index)
        else:
            free, row = seq_len, len(rows)
            rows.append([index])
        if free > size:
            insort(room, (free - size) * BUFFER_DOCS + row)
    return rows


def build_row(documents: Iterable[Encoded], *, seq_len: int, pad_id: int) -> PackedRow:
    """The documents one after another, then padding; no documents make a row of padding only."""
    input_ids = np.full(seq_len, pad_id, dtype=np.int64)
    labels = np.full(seq_len, IGNORE, dtype=np.int64)
    positions = np.zeros(seq_len, dtype=np.int64)
    doc_ids = np.full(seq_len, -1, dtype=np.int64)
    begin = 0
    for number, document in enumerate(documents):
        end = begin + len(document.ids)
        input_ids[begin:end] = document.ids
        labels[begin : end - 1] = np.where(document.is_target[1:], document.ids[1:], IGNORE)
        positions[begin:end] = np.arange(end - begin)
        doc_ids[begin:end] = number
        begin = end
    positions[begin:] = np.arange(seq_len - begin)  # by its positions padding looks like one more document
    return PackedRow(input_ids, labels, positions, doc_ids)
