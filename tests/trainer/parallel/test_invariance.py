"""A step is the same however its rows are split: over ranks, micro-batches, backends, and in whatever order.

Every loss of `trainer.models.losses` goes through it. What is expected comes from a plain torch loop, row by row.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from tests.oracles.measure import scaled_difference
from tests.support.ranks import run_ranks
from tests.trainer.parallel.invariance import (
    LOSSES,
    SEQ_LEN,
    Row,
    Split,
    Stepped,
    make_rows,
    plain_step,
    shipped_losses,
    splits_of,
    steps_of_rank,
)
from trainer.config.batch import BatchRules
from trainer.data.batches.micro_batches import build_batches
from trainer.dist import Dist

BACKENDS = {1: ("pytorch", "ddp", "fsdp"), 2: ("ddp", "fsdp"), 3: ("ddp", "fsdp"), 4: ("ddp", "fsdp")}
SPLITS = {
    world_size: [split for loss in LOSSES for backend in backends for split in splits_of(loss, backend, world_size)]
    for world_size, backends in BACKENDS.items()
}
EVERY = [
    pytest.param(world_size, index, id=f"{world_size}-{split}")
    for world_size, splits in SPLITS.items()
    for index, split in enumerate(splits)
]
BLOCKS_AND_ROOT = 3
EMBEDDING_AND_HEAD = ("model.embed_tokens", "lm_head")  # groups of their own in an untied model
BUCKETS, SUMS = 1, 1  # DDP has one bucket for so small a model; a step's sums are reduced once beside it


@cache
def taken(world_size: int) -> list[list[Stepped]]:
    """What each rank did for each split: one start of the ranks for all of them."""
    return run_ranks(steps_of_rank, world_size, SPLITS[world_size])


def case(world_size: int, index: int) -> tuple[Split, list[Stepped], Stepped]:
    """A split, what each rank did, and what is right."""
    split = SPLITS[world_size][index]
    return (
        split,
        [rank[index] for rank in taken(world_size)],
        plain_step(split.loss, count=split.count, tied=split.tied),
    )


@pytest.mark.parametrize(("world_size", "index"), EVERY)
def test_gradients_of_any_split_are_those_of_the_rows_one_by_one(world_size, index):
    _, ranks, expected = case(world_size, index)
    assert scaled_difference(ranks[0].grads, expected.grads) <= 1e-6


@pytest.mark.parametrize(("world_size", "index"), EVERY)
def test_logged_loss_of_any_split_is_the_mean_over_all_targets(world_size, index):
    _, ranks, expected = case(world_size, index)
    assert {rank.targets for rank in ranks} == {expected.targets}
    assert [rank.loss for rank in ranks] == pytest.approx([expected.loss] * world_size, rel=1e-6)


@pytest.mark.parametrize(("world_size", "index"), EVERY)
def test_gradients_are_reduced_once_a_step_or_with_every_micro_batch_when_asked(world_size, index):
    split, ranks, _ = case(world_size, index)
    several = world_size > 1
    times = 2 if dict(split.options).get("reduce_every_micro_batch") else 1  # four ranks have two micro-batches each
    ignored = dict(split.options).get("ignored_modules", [])
    own = [name for name in EMBEDDING_AND_HEAD if not split.tied and name not in ignored]
    groups = BLOCKS_AND_ROOT + len(own)
    expected = {"pytorch": 0, "ddp": BUCKETS + SUMS * several, "fsdp": groups * several * times}[split.backend]
    assert [rank.reductions for rank in ranks] == [expected] * world_size


def tokens_and_targets(rows: list[Row]) -> list[tuple[int, int]]:
    """What each of four ranks gets."""
    rules = BatchRules(SEQ_LEN, packing=True, micro_batch_size=4)
    ranks = [Dist(rank=rank, local_rank=rank, world_size=4, device=torch.device("cpu")) for rank in range(4)]
    given = [build_batches(rows, ranks=rank, rules=rules, pad_id=0) for rank in ranks]
    return [(sum(int(b.num_tokens) for b in each), sum(int(b.num_targets) for b in each)) for each in given]


def test_some_splits_leave_a_rank_without_targets_or_without_rows():
    assert [targets > 0 for _, targets in tokens_and_targets(make_rows())] == [True, True, True, False]
    assert [tokens > 0 for tokens, _ in tokens_and_targets(make_rows()[:2])] == [False, True, False, True]


def test_every_loss_that_is_shipped_goes_through_these_tests():
    assert shipped_losses() == LOSSES.keys()
