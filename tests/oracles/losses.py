"""The chunked cross entropy, compared with torch's on whole logits."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.oracles.measure import Oracle, largest_difference, scaled_difference, worst
from trainer.batch import IGNORE
from trainer.models.losses import chunked_cross_entropy

CHUNKS = {101: (1, 7, 64), 151_936: (8,)}


def case(rows: int, dim: int, vocab: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, head weight and labels, a third of them no targets."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, dim, generator=generator).requires_grad_()
    weight = torch.randn(vocab, dim, generator=generator).requires_grad_()
    labels = torch.randint(vocab, (rows,), generator=generator)
    labels[::3] = IGNORE
    return hidden, weight, labels


def whole(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy((hidden @ weight.T).float(), labels, ignore_index=IGNORE, reduction="sum")


def loss_difference(folder: Path, *, vocab: int) -> float:
    hidden, weight, labels = case(23, 16, vocab)
    expected = whole(hidden, weight, labels)
    losses = (chunked_cross_entropy(hidden, weight, labels=labels, chunk=chunk) for chunk in CHUNKS[vocab])
    return worst(largest_difference(loss / expected, torch.ones(())) for loss in losses)


def grads_difference(folder: Path, *, vocab: int) -> float:
    hidden, weight, labels = case(23, 16, vocab)
    inputs, names = (hidden, weight), ("hidden", "weight")
    expected = dict(zip(names, torch.autograd.grad(whole(*inputs, labels) / 3, inputs), strict=True))
    found = []
    for chunk in CHUNKS[vocab]:
        loss = chunked_cross_entropy(hidden, weight, labels=labels, chunk=chunk)
        found.append(dict(zip(names, torch.autograd.grad(loss / 3, inputs), strict=True)))
    return worst(scaled_difference(grads, expected) for grads in found)


def bf16_error(folder: Path) -> float:
    """Of the head's gradient, as a multiple of torch's own error in bf16."""
    hidden, weight, labels = case(64, 16, 1009)
    exact = torch.autograd.grad(whole(hidden, weight, labels), weight)[0]
    low = [x.detach().bfloat16().requires_grad_() for x in (hidden, weight)]
    ours = torch.autograd.grad(chunked_cross_entropy(*low, labels=labels, chunk=16), low[1])[0]
    theirs = torch.autograd.grad(whole(*low, labels), low[1])[0]
    return ((ours.float() - exact).norm() / (theirs.float() - exact).norm()).item()


CE = "torch F.cross_entropy on whole logits"
ORACLES = [
    oracle
    for vocab, chunks in CHUNKS.items()
    for inputs in [f"V = {vocab:,}, chunks of {', '.join(map(str, chunks))}"]
    for oracle in (
        Oracle("chunked cross entropy, relative", CE, inputs, 1e-6, partial(loss_difference, vocab=vocab)),
        Oracle("gradients of the chunked cross entropy", CE, inputs, 1e-5, partial(grads_difference, vocab=vocab)),
    )
] + [Oracle("error of those gradients in bf16", "that of torch in bf16", "V = 1,009", 2.0, bf16_error)]
