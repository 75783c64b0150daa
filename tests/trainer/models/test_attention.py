"""Packed attention by blocks: the same positions as the dense mask, as torch's own `create_block_mask` finds them."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from trainer.models.attention import attention, document_blocks, document_mask, why_no_flex

ROWS = {
    "documents within and across blocks": (300, [[100, 130, 20], [1, 1, 298]]),
    "one whole block": (128, [[128]]),
    "one token a row": (1, [[1], [1]]),
    "blocks of one document and of several": (513, [[513], [128, 129, 256], [60, 60], [384]]),
    "padding alone": (200, [[], [200]]),
}


def documents(length: int, rows: list[list[int]]) -> torch.Tensor:
    doc_ids = torch.full((len(rows), length), -1)
    for row, sizes in enumerate(rows):
        ids = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes, dtype=torch.long))
        doc_ids[row, : len(ids)] = ids
    return doc_ids


@pytest.mark.parametrize("case", ROWS)
def test_blocks_are_those_that_torch_finds_by_looking_at_every_score(case):
    doc_ids = documents(*ROWS[case])
    rows, length = doc_ids.shape

    def visible(b, h, q, k):
        return (q >= k) & (doc_ids[b, q] == doc_ids[b, k])

    expected = create_block_mask(visible, rows, None, length, length, device="cpu")
    found = document_blocks(doc_ids)
    assert torch.equal(found.to_dense(), expected.to_dense())
    assert torch.equal(found.full_kv_num_blocks, expected.full_kv_num_blocks)
    assert torch.equal(found.full_q_num_blocks, expected.full_q_num_blocks)
    assert torch.equal(found.q_num_blocks, expected.q_num_blocks)


@torch.no_grad()
def test_attention_by_blocks_is_that_of_the_dense_mask_for_any_layout_without_recompiling():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    q, k, v = (torch.randn(2, heads, 300, 16) for heads in (4, 2, 2))
    for sizes in ([[100, 130, 20], [1, 1, 298]], [[300], [7, 150]]):
        doc_ids = documents(300, sizes)
        expected = attention(q, k, v, document_mask(doc_ids))
        torch.testing.assert_close(attention(q, k, v, document_blocks(doc_ids)), expected, rtol=1e-5, atol=1e-6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_flex_attention_is_refused_for_heads_that_it_has_no_kernel_for():
    assert why_no_flex(torch.device("cuda"), 8) == "FlexAttention takes no head_dim of 8"
    assert why_no_flex(torch.device("cpu"), 64) == "not on a GPU"
