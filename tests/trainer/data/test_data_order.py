"""How much of each source an epoch has, and in which order."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.dataset.order import Mixture, epoch_documents, interleave, plan_epoch, shares
from trainer.schema import Config, DataConfig, SourceConfig, TrainConfig


def mixture_of(*sources: tuple[int, SourceConfig]) -> Mixture:
    """Sources of so many documents each; the keys of the documents fall with their number."""
    of_source = np.repeat(np.arange(len(sources)), [size for size, _ in sources])
    return Mixture([source for _, source in sources], of_source, np.arange(len(of_source))[::-1])


def documents(mixture: Mixture, epoch: int = 0, *, seed: int = 0, shuffle: bool = True) -> list[int]:
    return epoch_documents(mixture, epoch=epoch, seed=seed, shuffle=shuffle).tolist()


def test_without_settings_an_epoch_is_every_document_once():
    mixture = mixture_of((5, SourceConfig("a")), (3, SourceConfig("b")))
    assert sorted(documents(mixture)) == list(range(8))
    assert documents(mixture) != documents(mixture, 1)


@pytest.mark.parametrize(
    ("repeat", "expected"),
    [(2.0, {0: 2, 1: 2, 2: 2, 3: 2}), (0.5, {2: 1, 3: 1}), (2.25, {0: 2, 1: 2, 2: 2, 3: 3}), (0.1, {})],
)
def test_repeat_gives_each_document_so_often_and_of_a_part_those_with_the_smallest_keys(repeat, expected):
    mixture = mixture_of((4, SourceConfig("a", repeat=repeat)), (1, SourceConfig("b")))
    for epoch in (0, 1):
        assert Counter(documents(mixture, epoch)) == Counter(expected | {4: 1})


def test_weights_give_the_asked_shares_of_an_epoch_as_long_as_all_sources():
    mixture = mixture_of((90, SourceConfig("a", weight=1)), (10, SourceConfig("b", weight=3)))
    order = documents(mixture)
    assert len(order) == 100
    assert sum(index < 90 for index in order) == 25
    assert mixture.asked() == [0.25, 0.75]


def test_weighted_source_is_gone_through_again_in_another_order():
    mixture = mixture_of((6, SourceConfig("a", weight=1)), (2, SourceConfig("b", weight=3)))
    from_b = [index for epoch in range(5) for index in documents(mixture, epoch) if index >= 6]
    assert len(from_b) == 30
    assert all(sorted(from_b[i : i + 2]) == [6, 7] for i in range(0, 30, 2))  # also across the ends of epochs
    assert len({tuple(from_b[i : i + 2]) for i in range(0, 30, 2)}) == 2
    from_a = [index for epoch in range(3) for index in documents(mixture, epoch) if index < 6]
    assert sorted(from_a) == [0, 1, 2, 3, 4, 5]


@given(st.lists(st.integers(0, 30), min_size=1, max_size=5))
def test_every_beginning_of_an_epoch_has_the_sources_in_proportion(counts):
    order = interleave(np.array(counts))
    assert np.bincount(order, minlength=len(counts)).tolist() == counts
    for end in range(1, len(order) + 1):
        so_far = np.bincount(order[:end], minlength=len(counts))
        assert (np.abs(so_far - np.array(counts) * end / len(order)) < len(counts)).all()


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=6), st.integers(1, 1000))
def test_shares_add_up_and_are_exact_to_one(weights, total):
    counts = shares(weights, total, np.ones(len(weights)))
    assert counts.sum() == total
    assert (np.abs(counts - np.array(weights) / sum(weights) * total) < 1 + 1e-6).all()


def test_source_without_documents_leaves_its_share_to_the_others():
    mixture = mixture_of((0, SourceConfig("a", weight=1)), (4, SourceConfig("b", weight=1)))
    assert sorted(documents(mixture)) == [0, 1, 2, 3]


def test_order_of_a_mixture_is_a_function_of_seed_and_epoch():
    mixture = mixture_of((50, SourceConfig("a", weight=1)), (50, SourceConfig("b", weight=2)))
    assert documents(mixture, 1, seed=3) == documents(mixture, 1, seed=3)
    assert len({tuple(documents(mixture, epoch, seed=seed)) for epoch in (0, 1) for seed in (0, 1)}) == 4


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("shuffle", [True, False])
def test_rows_of_a_weighted_epoch_hold_its_documents(packing, shuffle):
    mixture = mixture_of((50, SourceConfig("a", weight=1)), (50, SourceConfig("b", weight=2)))
    config = Config(data=DataConfig(seq_len=16, packing=packing, shuffle=shuffle), train=TrainConfig(seed=5))
    lengths = [3 + index % 7 for index in range(100)]
    rows = plan_epoch(lengths, epoch=1, config=config, mixture=mixture)
    expected = documents(mixture, 1, seed=5, shuffle=shuffle)
    assert Counter(index for row in rows for index in row) == Counter(expected)
    assert all(sum(lengths[index] for index in row) <= 16 for row in rows)
