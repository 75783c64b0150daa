"""The chunked cross entropy, compared with torch's and transformers'."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.test_models import from_folder, save_hf
from tests.tiny import packed_batch, tiny_decoder, tiny_shape
from trainer.batch import IGNORE, Batch
from trainer.losses import chunked_cross_entropy, sft_loss


def case(rows: int, dim: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, dim, generator=generator).requires_grad_()
    weight = torch.randn(vocab, dim, generator=generator).requires_grad_()
    labels = torch.randint(vocab, (rows,), generator=generator)
    labels[::3] = IGNORE
    return hidden, weight, labels


@pytest.mark.parametrize(("vocab", "chunk"), [(101, 1), (101, 7), (101, 64), (151_936, 8)])
def test_chunked_loss_and_gradients_equal_torch_on_full_logits(vocab, chunk):
    hidden, weight, labels = case(23, 16, vocab)
    loss = chunked_cross_entropy(hidden, weight, labels=labels, chunk=chunk)
    expected = F.cross_entropy(hidden @ weight.T, labels, ignore_index=IGNORE, reduction="sum")
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    grads = torch.autograd.grad(loss / 3, (hidden, weight))
    for got, want in zip(grads, torch.autograd.grad(expected / 3, (hidden, weight)), strict=True):
        torch.testing.assert_close(got, want, atol=1e-6 * want.abs().max().item(), rtol=1e-5)


def test_loss_without_gradients_is_the_same():
    hidden, weight, labels = case(23, 16, 101)
    with torch.no_grad():
        loss = chunked_cross_entropy(hidden, weight, labels=labels, chunk=7)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, chunked_cross_entropy(hidden, weight, labels=labels), rtol=1e-6, atol=0)


def test_bf16_loss_is_within_twice_the_error_of_torch_in_bf16():
    hidden, weight, labels = case(64, 16, 1009)
    exact = torch.autograd.grad(chunked_cross_entropy(hidden, weight, labels=labels), weight)[0]
    low = [x.detach().bfloat16().requires_grad_() for x in (hidden, weight)]
    ours = torch.autograd.grad(chunked_cross_entropy(*low, labels=labels, chunk=16), low[1])[0]
    logits = (low[0] @ low[1].T).float()
    theirs = torch.autograd.grad(F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum"), low[1])[0]
    assert (ours.float() - exact).norm() <= 2 * (theirs.float() - exact).norm()


def test_sft_loss_equals_transformers_loss_on_labels(tmp_path):
    theirs = save_hf(tiny_shape(), tmp_path)
    batch = packed_batch([[20], [20]], length=20)
    loss = sft_loss(from_folder(tmp_path, tiny_shape()), batch)
    hf_labels = F.pad(batch.labels[:, :-1], (1, 0), value=IGNORE)  # transformers shifts them itself
    with torch.no_grad():
        expected = theirs(batch.input_ids, labels=hf_labels).loss
    torch.testing.assert_close(loss.total / loss.count, expected, atol=1e-6, rtol=0)


def test_packed_loss_is_the_sum_of_each_documents_loss():
    decoder = tiny_decoder()
    packed = packed_batch([[5, 9, 6]], length=20)
    total = torch.zeros(())
    for start, end in [(0, 5), (5, 14), (14, 20)]:
        parts = (packed.input_ids, packed.labels, packed.positions, packed.doc_ids)
        total = total + sft_loss(decoder, Batch(*(x[:, start:end] for x in parts)), packed=False).total
    torch.testing.assert_close(sft_loss(decoder, packed).total, total, rtol=1e-6, atol=0)


def test_a_batch_without_targets_gives_zero_and_zero_gradients():
    decoder = tiny_decoder()
    batch = packed_batch([[1, 1]], length=6)
    loss = sft_loss(decoder, batch)
    loss.total.backward()
    assert (loss.total.item(), loss.count.item()) == (0.0, 0)
    assert all(parameter.grad.abs().max() == 0 for parameter in decoder.parameters())


def test_tied_weight_gets_the_gradient_of_both_its_uses(tmp_path):
    theirs = save_hf(tiny_shape(), tmp_path)
    ours = from_folder(tmp_path, tiny_shape())
    batch = packed_batch([[30]], length=30)
    loss = sft_loss(ours, batch)
    (loss.total / loss.count).backward()
    theirs(batch.input_ids, labels=F.pad(batch.labels[:, :-1], (1, 0), value=IGNORE)).loss.backward()
    expected = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        scale = expected[name].grad.abs().max().item()
        torch.testing.assert_close(parameter.grad, expected[name].grad, atol=1e-5 * scale, rtol=1e-5)
