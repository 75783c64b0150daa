"""Batches on their way to the GPU."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from tests.support.tiny import packed_batch
from trainer.batch import IGNORE, Batch
from trainer.data.batches.steps import Ahead
from trainer.dist import Dist


@pytest.fixture
def no_waiting():
    """Whatever waits for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def tensors(batch: Batch) -> list[torch.Tensor]:
    found = [getattr(batch, field.name) for field in fields(batch)]
    assert None not in found
    return found


def test_batches_are_pinned_and_their_copies_wait_for_nothing(no_waiting):
    device = torch.device("cuda", 0)
    made = packed_batch([[5, 3]] * 4, length=8)
    made = replace(made, targets=torch.nonzero(made.labels.flatten() != IGNORE).flatten())
    ahead = Ahead(lambda step: [made], Dist(rank=0, local_rank=0, world_size=1, device=device))
    batch = ahead.take(0, total_steps=2)[0]
    ahead.close()
    assert all(tensor.is_pinned() for tensor in tensors(batch))
    there = batch.to(device)
    torch.cuda.set_sync_debug_mode("default")
    for tensor, original in zip(tensors(there), tensors(made), strict=True):
        assert torch.equal(tensor.cpu(), original)
