"""Greedy decoding, short and without a cache: for checks and samples."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trainer.models.decoder import Decoder, logits_head


@torch.no_grad()
def sequence_logits(model: Decoder, ids: Sequence[int]) -> torch.Tensor:
    """The logits after each of the tokens `ids`, [len(ids), V] fp32 on the model's device."""
    device = model.head_weight.device
    input_ids = torch.tensor([list(ids)], dtype=torch.int64, device=device)
    positions = torch.arange(len(ids), device=device).unsqueeze(0)
    logits: torch.Tensor = model(input_ids, positions, torch.zeros_like(input_ids), packed=False, head=logits_head)
    return logits[0]


def greedy(model: Decoder, prompt_ids: Sequence[int], n: int) -> list[int]:
    """The `n` most probable next tokens after a prompt, each computed from the whole sequence before it.

    `model` is a plain (unsharded) Decoder. The end token does not stop it.
    """
    ids = list(prompt_ids)
    for _ in range(n):
        ids.append(int(sequence_logits(model, ids)[-1].argmax()))
    return ids[len(prompt_ids) :]
