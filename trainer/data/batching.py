"""The micro-batches of one rank, made of the rows of a step; pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from trainer.batch import Batch
from trainer.data.packing import PackedRow, build_row


class Ranks(Protocol):
    """What is needed of `trainer.dist.Dist`."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...


def build_batches(
    rows: Sequence[Sequence[Any]], *, ranks: Ranks, micro_batch_size: int, seq_len: int, pad_id: int
) -> list[Batch]:
    """This rank's share of `rows` (lists of documents), [micro_batch_size, seq_len] each, as many on every rank."""
    world = ranks.world_size
    begin, end = len(rows) * ranks.rank // world, len(rows) * (ranks.rank + 1) // world
    largest = -(-len(rows) // world)
    count = -(-largest // micro_batch_size)
    mine = [build_row(docs, seq_len=seq_len, pad_id=pad_id) for docs in rows[begin:end]]
    empty = build_row([], seq_len=seq_len, pad_id=pad_id)
    mine += [empty] * (count * micro_batch_size - len(mine))
    return [_batch(mine[i : i + micro_batch_size]) for i in range(0, len(mine), micro_batch_size)]


def _batch(rows: Sequence[PackedRow]) -> Batch:
    return Batch(
        input_ids=torch.from_numpy(np.stack([row.input_ids for row in rows])),
        labels=torch.from_numpy(np.stack([row.labels for row in rows])),
        positions=torch.from_numpy(np.stack([row.positions for row in rows])),
        doc_ids=torch.from_numpy(np.stack([row.doc_ids for row in rows])),
    )
