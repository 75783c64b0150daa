"""Divides the rows of a step into the micro-batches of every rank; without side effects, so each rank can compute the
others' too.

All ranks get the same number of micro-batches, because a forward that only some of them run would hang the rest.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from trainer.batch import IGNORE, Batch
from trainer.config.batch import BatchRules
from trainer.data.batches.packing import PackedRow, build_row
from trainer.data.tokenize.chat import Encoded


class Ranks(Protocol):
    """The part of `trainer.dist.Dist` that is used here."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...


@dataclass(frozen=True)
class MicroBatch:
    """[num_rows, length] tokens: the rows of the step with these indices, and then rows of padding only."""

    rows: tuple[int, ...]
    num_rows: int
    length: int

    @property
    def num_tokens(self) -> int:
        """The number of positions including padding, which determines the cost."""
        return self.num_rows * self.length


def build_batches(
    rows: Sequence[Iterable[Encoded]],
    *,
    ranks: Ranks,
    rules: BatchRules,
    pad_id: int,
    lengths: Sequence[int] | None = None,
) -> list[Batch]:
    """This rank's share of `rows` (documents each), as many micro-batches on every rank.

    With `lengths`, the tokens of each row, only this rank's rows are iterated over, and once: they may be generators
    that read their documents.
    """
    lengths = [sum(len(doc.ids) for doc in row) for row in rows] if lengths is None else lengths
    plan = plan_micro_batches(lengths, world_size=ranks.world_size, rules=rules)[ranks.rank]
    return [_build(micro, rows, pad_id) for micro in plan]


def plan_micro_batches(lengths: Sequence[int], *, world_size: int, rules: BatchRules) -> list[list[MicroBatch]]:
    """The micro-batches of each rank, equally many; every row of the step (of `lengths[i]` tokens) is in one of them.

    Without a token budget the ranks share the rows as they come. With one, rows of like length go together, and the
    ranks get about the same number of tokens, in each forward and in all: they wait for each other in both.
    """
    if rules.micro_batch_tokens is None:
        return _plan_by_rows(lengths, world_size, rules)
    return _plan_by_tokens(lengths, world_size, rules, rules.micro_batch_tokens)


def rows_of_rank(lengths: Sequence[int], rank: int, *, world_size: int, rules: BatchRules) -> list[int]:
    """The rows of a step that one rank trains on, in the order of its micro-batches."""
    plan = plan_micro_batches(lengths, world_size=world_size, rules=rules)[rank]
    return [row for micro in plan for row in micro.rows]


def padding_share(lengths: Sequence[int], *, step_rows: int, world_size: int, rules: BatchRules) -> float:
    """The part of the rows' positions that holds no document, in steps of `step_rows` rows."""
    if rules.packing:
        positions = len(lengths) * rules.seq_len
    else:
        steps = [lengths[begin : begin + step_rows] for begin in range(0, len(lengths), step_rows or 1)]
        plans = (plan_micro_batches(step, world_size=world_size, rules=rules) for step in steps)
        positions = sum(len(micro.rows) * micro.length for plan in plans for rank in plan for micro in rank)
    return 1 - sum(lengths) / positions if positions else 0.0


def rows_within(lengths: Sequence[int], *, micro_batches: int, world_size: int, rules: BatchRules) -> int:
    """How many of the first rows make at most `micro_batches` on every rank."""
    if rules.micro_batch_tokens is None:
        return min(len(lengths), micro_batches * rules.micro_batch_size * world_size)

    def needed(count: int) -> int:
        return len(plan_micro_batches(lengths[:count], world_size=world_size, rules=rules)[0])

    return bisect_right(range(len(lengths) + 1), micro_batches, key=needed) - 1


# --- a number of rows ------------------------------------------------------------------------------------------------


def _plan_by_rows(lengths: Sequence[int], world_size: int, rules: BatchRules) -> list[list[MicroBatch]]:
    size, total = rules.micro_batch_size, len(lengths)
    count = -(-total // (world_size * size))
    plan = []
    for rank in range(world_size):
        mine = range(total * rank // world_size, total * (rank + 1) // world_size)
        parts = [tuple(mine[begin : begin + size]) for begin in range(0, count * size, size)]
        plan.append([_micro_batch(part, lengths, rules, num_rows=size) for part in parts])
    return plan


def _micro_batch(
    rows: tuple[int, ...], lengths: Sequence[int], rules: BatchRules, *, num_rows: int | None = None
) -> MicroBatch:
    longest = max((lengths[row] for row in rows), default=0)
    return MicroBatch(rows, max(len(rows), 1) if num_rows is None else num_rows, rules.padded(longest))


# --- a number of tokens ----------------------------------------------------------------------------------------------


def _plan_by_tokens(lengths: Sequence[int], world_size: int, rules: BatchRules, budget: int) -> list[list[MicroBatch]]:
    longest_first = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    parts = _cut(longest_first, lengths, rules, budget)
    parts = _fill_up(parts, lengths, rules, multiple=world_size)
    batches = [_micro_batch(part, lengths, rules) for part in parts]
    return _deal(batches, world_size)


def _cut(order: Sequence[int], lengths: Sequence[int], rules: BatchRules, budget: int) -> list[tuple[int, ...]]:
    """Neighbours in `order`, longest first, as many together as the budget allows; one at least."""
    parts = []
    begin = 0
    while begin < len(order):
        fitting = max(1, budget // rules.padded(lengths[order[begin]]))
        parts.append(tuple(order[begin : begin + fitting]))
        begin += fitting
    return parts


def _fill_up(
    parts: list[tuple[int, ...]], lengths: Sequence[int], rules: BatchRules, *, multiple: int
) -> list[tuple[int, ...]]:
    """A multiple of `multiple` parts: the largest are halved, so that no rank is idle; then empty ones are added."""
    parts = list(parts)
    while len(parts) % multiple:
        largest = max(
            (index for index, part in enumerate(parts) if len(part) > 1),
            key=lambda index: _micro_batch(parts[index], lengths, rules).num_tokens,
            default=None,
        )
        if largest is None:
            parts.append(())
        else:
            part = parts[largest]
            parts[largest : largest + 1] = [part[: len(part) // 2], part[len(part) // 2 :]]
    return parts


def _deal(batches: Sequence[MicroBatch], world_size: int) -> list[list[MicroBatch]]:
    """The batches in rounds, the largest first; in each round the rank with the fewest tokens takes the largest."""
    plan: list[list[MicroBatch]] = [[] for _ in range(world_size)]
    load = [0] * world_size
    by_size = sorted(batches, key=lambda micro: (-micro.num_tokens, micro.rows))
    for begin in range(0, len(by_size), world_size):
        order = sorted(range(world_size), key=lambda rank: (load[rank], rank))
        for rank, micro in zip(order, by_size[begin : begin + world_size], strict=True):
            plan[rank].append(micro)
            load[rank] += micro.num_tokens
    return plan


# --- arrays ----------------------------------------------------------------------------------------------------------


def _build(micro: MicroBatch, rows: Sequence[Iterable[Encoded]], pad_id: int) -> Batch:
    filler: list[Iterable[Encoded]] = [[]] * (micro.num_rows - len(micro.rows))
    packed = [
        build_row(docs, seq_len=micro.length, pad_id=pad_id) for docs in [*(rows[i] for i in micro.rows), *filler]
    ]
    return _stack(packed)


def _stack(rows: Sequence[PackedRow]) -> Batch:
    labels = np.stack([row.labels for row in rows])
    return Batch(
        input_ids=torch.from_numpy(np.stack([row.input_ids for row in rows])),
        labels=torch.from_numpy(labels),
        positions=torch.from_numpy(np.stack([row.positions for row in rows])),
        doc_ids=torch.from_numpy(np.stack([row.doc_ids for row in rows])),
        targets=torch.from_numpy(np.flatnonzero(labels != IGNORE)),
    )
