"""How the rows of a step are shared by ranks and micro-batches."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.config.batch import BatchRules
from trainer.data.batches.micro_batches import MicroBatch, padding_share, plan_micro_batches, rows_within

BUDGET = 96
budgeted = BatchRules(seq_len=64, packing=False, micro_batch_size=4, micro_batch_tokens=BUDGET)
by_rows = BatchRules(seq_len=64, packing=False, micro_batch_size=2)

some_lengths = st.lists(st.integers(1, 64), min_size=1, max_size=40)
ranks = st.integers(1, 5)


def test_budget_groups_rows_of_like_length_and_deals_them_out():
    plan = plan_micro_batches([8, 30, 10, 7, 60, 8, 17], world_size=2, rules=budgeted)
    assert plan == [
        [MicroBatch((4,), 1, 64), MicroBatch((0, 5, 3), 3, 8)],
        [MicroBatch((6, 2), 2, 24), MicroBatch((1,), 1, 32)],
    ]


def test_unpacked_rows_are_padded_to_the_longest_of_their_micro_batch():
    plan = plan_micro_batches([3, 9, 61, 2, 5], world_size=2, rules=by_rows)
    assert plan == [
        [MicroBatch((0, 1), 2, 16), MicroBatch((), 2, 8)],
        [MicroBatch((2, 3), 2, 64), MicroBatch((4,), 2, 8)],
    ]


@pytest.mark.parametrize(("length", "padded"), [(0, 5), (3, 5), (5, 5)])
def test_no_row_is_padded_beyond_seq_len(length, padded):
    rules = BatchRules(seq_len=5, packing=False, micro_batch_size=1)
    assert rules.padded(length) == padded


def test_packed_rows_are_seq_len_long():
    rules = BatchRules(seq_len=64, packing=True, micro_batch_size=2)
    assert plan_micro_batches([3, 9, 5], world_size=1, rules=rules) == [
        [MicroBatch((0, 1), 2, 64), MicroBatch((2,), 2, 64)]
    ]


@settings(max_examples=200)
@given(some_lengths, ranks, st.sampled_from([budgeted, by_rows]))
def test_every_row_is_in_one_micro_batch_and_all_ranks_have_as_many(lengths, world_size, rules):
    plan = plan_micro_batches(lengths, world_size=world_size, rules=rules)
    assert sorted(row for rank in plan for micro in rank for row in micro.rows) == list(range(len(lengths)))
    assert len({len(rank) for rank in plan}) == 1
    assert all(lengths[row] <= micro.length for rank in plan for micro in rank for row in micro.rows)


@settings(max_examples=200)
@given(some_lengths, ranks)
def test_budget_is_kept_and_ranks_are_balanced(lengths, world_size):
    plan = plan_micro_batches(lengths, world_size=world_size, rules=budgeted)
    assert max(micro.num_tokens for rank in plan for micro in rank) <= BUDGET
    loads = [sum(micro.num_tokens for micro in rank) for rank in plan]
    assert max(loads) - min(loads) <= BUDGET


@settings(max_examples=100)
@given(some_lengths, ranks)
def test_a_rank_is_idle_only_when_there_are_no_more_rows_to_share(lengths, world_size):
    plan = plan_micro_batches(lengths, world_size=world_size, rules=budgeted)
    micros = [micro for rank in plan for micro in rank]
    assert all(micro.rows for micro in micros) or all(len(micro.rows) < 2 for micro in micros)
    assert all(micro.num_tokens == 8 for micro in micros if not micro.rows)


def test_budget_saves_padding():
    lengths = [5 + 59 * (i % 7 == 0) for i in range(70)]
    shares = [padding_share(lengths, step_rows=70, world_size=2, rules=rules) for rules in (by_rows, budgeted)]
    # 10 rows hold 64 tokens and 60 hold 5; in pairs every long one has a neighbour padded to 64
    assert shares == [1 - 940 / (20 * 64 + 50 * 8), 1 - 940 / (10 * 64 + 60 * 8)]


def test_packed_rows_have_the_padding_of_seq_len():
    rules = BatchRules(seq_len=64, packing=True, micro_batch_size=2)
    assert padding_share([64, 48, 16], step_rows=2, world_size=4, rules=rules) == 1 - 128 / 192


@settings(max_examples=100)
@given(some_lengths, ranks, st.integers(1, 4), st.sampled_from([budgeted, by_rows]))
def test_first_rows_within_a_number_of_micro_batches(lengths, world_size, count, rules):
    rows = rows_within(lengths, micro_batches=count, world_size=world_size, rules=rules)
    assert rows >= min(len(lengths), count * world_size)
    assert len(plan_micro_batches(lengths[:rows], world_size=world_size, rules=rules)[0]) <= count
