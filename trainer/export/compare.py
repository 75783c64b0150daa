"""Whether a model that was read back computes what ours does, on rows of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor

from trainer.batch import Batch
from trainer.errors import ModelError
from trainer.models.decoder import Decoder, logits_head

ROWS, TOKENS = 2, 64
"""How many rows are compared, and their tokens at most: what differs in one place differs in nearly every logit."""

Rows = Sequence[Sequence[int]]


def rows_of(batches: Sequence[Batch]) -> list[list[int]]:
    """The beginnings of the first documents in the first rows of these batches; none where all is padding."""
    rows = ((ids, docs) for batch in batches for ids, docs in zip(batch.input_ids, batch.doc_ids, strict=True))
    begun = ((ids, docs) for ids, docs in rows if docs[0] >= 0)
    return [ids[docs == docs[0]][:TOKENS].tolist() for ids, docs in islice(begun, ROWS)]


def random_rows(vocab_size: int) -> list[list[int]]:
    """Rows for a model whose data are not at hand, always the same."""
    generator = torch.Generator().manual_seed(0)
    rows: list[list[int]] = torch.randint(vocab_size, (ROWS, TOKENS), generator=generator).tolist()
    return rows


@torch.no_grad()
def sequence_logits(model: Decoder, ids: Sequence[int]) -> Tensor:
    """The logits after each of the tokens `ids`, [len(ids), V] fp32 on the model's device."""
    device = model.head_weight.device
    input_ids = torch.tensor([list(ids)], dtype=torch.int64, device=device)
    positions = torch.arange(len(ids), device=device).unsqueeze(0)
    logits: Tensor = model(input_ids, positions, torch.zeros_like(input_ids), packed=False, head=logits_head)
    return logits[0]


def check_logits(got: Sequence[Tensor], expected: Sequence[Tensor], what: str) -> list[list[int]]:
    """The most probable token after each of each row's, by the expected logits, [tokens, V] for each row.

    Raises ModelError that names `what` for logits further apart than 1e-4 of their scale.
    """
    for row, ours in zip(got, expected, strict=True):
        error, limit = (row - ours).abs().max().item(), 1e-4 * max(1.0, ours.abs().max().item())
        if not error <= limit:
            raise ModelError(f"{what} computes other logits: off by {error:.3g}, allowed {limit:.3g}")
    return [ours.argmax(dim=-1).tolist() for ours in expected]
