"""The losses at their edges; tests/oracles compares them with torch's and transformers'."""

from __future__ import annotations

import torch

from tests.oracles.losses import case
from tests.support.tiny import packed_batch, tiny_decoder
from trainer.models.losses import chunked_cross_entropy, sft_loss


def test_loss_without_gradients_is_the_same():
    hidden, weight, labels = case(23, 16, 101)
    with torch.no_grad():
        loss = chunked_cross_entropy(hidden, weight, labels=labels, chunk=7)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, chunked_cross_entropy(hidden, weight, labels=labels), rtol=1e-6, atol=0)


def test_a_batch_without_targets_gives_zero_and_zero_gradients():
    decoder = tiny_decoder()
    batch = packed_batch([[1, 1]], length=6)
    loss = sft_loss(decoder, batch)
    loss.total.backward()
    assert (loss.total.item(), loss.count.item()) == (0.0, 0)
    assert all(parameter.grad.abs().max() == 0 for parameter in decoder.parameters())
