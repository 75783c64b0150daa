"""Documents of a row stay apart under every attention kernel of CUDA that takes a mask."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.support.tiny import packed_batch, tiny_decoder
from trainer.batch import Batch
from trainer.models.families.decoder import Decoder
from trainer.models.layers import logits_head

KERNELS = [SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
CHOSEN = "the one that torch chooses"
CASES = [(kernel, dtype) for kernel in (*KERNELS, CHOSEN) for dtype in (torch.float32, torch.bfloat16)]
CASES.remove((SDPBackend.CUDNN_ATTENTION, torch.float32))  # knows 16 bits alone


def logits(decoder: Decoder, batch: Batch) -> torch.Tensor:
    batch = batch.to("cuda")
    with torch.no_grad():
        return decoder(batch.input_ids, batch.positions, batch.doc_ids, head=logits_head)


@pytest.mark.parametrize(("kernel", "dtype"), CASES, ids=[f"{str(k).split('.')[-1]}-{d}" for k, d in CASES])
def test_one_documents_tokens_never_reach_another(kernel, dtype):
    decoder = tiny_decoder(hidden_size=128, head_dim=32).cuda()
    decoder.compute_dtype = dtype
    batch = packed_batch([[60, 100, 50]], length=256)
    other = batch.input_ids.clone()
    other[0, 60:160] = (other[0, 60:160] + 1) % 101
    with sdpa_kernel(KERNELS if kernel is CHOSEN else kernel):
        before, after = logits(decoder, batch)[0], logits(decoder, replace(batch, input_ids=other))[0]
    assert torch.equal(before[:60], after[:60])
    assert torch.equal(before[160:210], after[160:210])
    assert not torch.equal(before[60:160], after[60:160])
