"""Micro-batches of a token budget on real ranks: unequal work, the same gradients, and nobody waits forever."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.gradients import assert_same_grads, config, full_grads, prepared
from tests.support.ranks import run_ranks
from tests.support.tiny import ALONE, tiny_shape
from trainer.config.batch import BatchRules
from trainer.data.batches.micro_batches import build_batches
from trainer.data.tokenize.chat import Encoded
from trainer.dist import Dist, sum_over_ranks
from trainer.models.losses import sft_loss

LENGTHS = [3, 40, 9, 17, 2, 5, 11]
ONE_LONG_ROW = [40]  # all ranks but one have nothing, and take part all the same


def rows_of_lengths(lengths: list[int]) -> list[list[Encoded]]:
    random = np.random.RandomState(0)
    return [[Encoded(str(n), random.randint(0, 101, n).astype(np.int32), random.rand(n) < 0.7)] for n in lengths]


def loss_and_grads(dist: Dist, backend: str, rules: BatchRules) -> list[tuple[float, int, dict[str, Tensor]]]:
    """For each list of rows: the loss and the targets over all ranks, and the whole gradients."""
    strategy, module = prepared(dist, config(backend), tiny_shape())
    results = []
    for lengths in (LENGTHS, ONE_LONG_ROW):
        module.zero_grad()
        batches = build_batches(rows_of_lengths(lengths), ranks=dist, rules=rules, pad_id=0)
        sums = torch.zeros(2, dtype=torch.float64)
        for number, batch in enumerate(batches):
            strategy.sync(number == len(batches) - 1)
            loss = sft_loss(module, batch, packed=False)
            loss.total.backward()
            sums += torch.stack([loss.total.detach().double(), loss.count.double()])
        total, count = sum_over_ranks(sums, dist).tolist()
        results.append((total, int(count), full_grads(module)))
    return results


@pytest.fixture(scope="module")
def alone() -> list[tuple[float, int, dict[str, Tensor]]]:
    """All rows at once in one process, padded to 40 or to seq_len."""
    return loss_and_grads(ALONE, "pytorch", BatchRules(seq_len=40, packing=True, micro_batch_size=7))


BUDGET = BatchRules(seq_len=40, packing=False, micro_batch_size=7, micro_batch_tokens=40)
BY_ROWS = BatchRules(seq_len=40, packing=False, micro_batch_size=2)


@pytest.mark.parametrize("rules", [BUDGET, BY_ROWS], ids=["tokens", "rows"])
def test_rows_padded_to_their_micro_batch_give_the_loss_of_rows_padded_to_seq_len(alone, rules):
    for got, want in zip(loss_and_grads(ALONE, "pytorch", rules), alone, strict=True):
        assert got[:2] == (pytest.approx(want[0], rel=1e-6), want[1])
        assert_same_grads(got[2], want[2], 1e-6)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
def test_token_budget_gives_the_gradients_of_one_process(alone, backend, world_size):
    for results in run_ranks(loss_and_grads, world_size, backend, BUDGET):
        for got, want in zip(results, alone, strict=True):
            assert got[:2] == (pytest.approx(want[0], rel=1e-6), want[1])
            assert_same_grads(got[2], want[2], 1e-6)
