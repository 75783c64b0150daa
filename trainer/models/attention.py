"""Attention within documents: which positions see which, and the kernels that compute it.

Rows of one document each need no mask: causal attention of cuDNN, the fastest there is on H100 and H200. Packed rows go
through FlexAttention, which skips the blocks of 128 x 128 scores between documents; where it cannot run, through a
dense mask, which is as right and slow.

Shapes: B rows, T positions, H query heads, K key-value heads, E head_dim, N blocks of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from trainer.kernels.support import why_no_triton

BLOCK = 128
"""Positions of a block of scores; the kernels' own default."""
FLEX_HEAD_DIMS = range(16, 257)
PADDING = 2**40
"""Padding as the document after all others, so that documents never decrease along a row; the rest of the last block,
behind the row's end, as the one after that."""
KERNEL_ORDER = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]

Mask = Tensor | BlockMask | None


@contextmanager
def fastest_kernels() -> Iterator[None]:
    """cuDNN's attention before torch's own choice: 1.8 times as fast, forward and backward, on H100 (torch 2.11).

    A compiled region keeps the kernel of its first call, so this must be around that too.
    """
    with sdpa_kernel(KERNEL_ORDER, set_priority=True):
        yield


def why_no_flex(device: torch.device, head_dim: int) -> str | None:
    """Why packed rows cannot go through FlexAttention; None when they can."""
    if head_dim not in FLEX_HEAD_DIMS:
        return f"FlexAttention takes no head_dim of {head_dim}"
    return why_no_triton(device)


def document_mask(doc_ids_bt: Tensor) -> Tensor:
    """Which position sees which: [B, 1, T, T] bool, the same document and not later.

    Padding (-1) forms a document of its own, so no row of the mask is empty and no softmax is NaN.
    """
    length = doc_ids_bt.shape[1]
    same = doc_ids_bt.unsqueeze(2) == doc_ids_bt.unsqueeze(1)
    causal = torch.ones(length, length, dtype=torch.bool, device=doc_ids_bt.device).tril()
    return (same & causal).unsqueeze(1)


def document_blocks(doc_ids_bt: Tensor) -> BlockMask:
    """The same as `document_mask` by blocks: which hold no score, only scores or some. Nothing waits for the device.

    `doc_ids_bt` never decreases along a row but for the padding (-1) at its end.
    """
    length = doc_ids_bt.shape[1]
    first_bn, last_bn = _bounds(doc_ids_bt)
    order = torch.arange(first_bn.shape[1], device=doc_ids_bt.device)
    earlier, causal = order[:, None] > order[None, :], order[:, None] >= order[None, :]
    some_bnn = causal & (last_bn[:, None, :] >= first_bn[:, :, None])
    inside = (first_bn == last_bn)[:, :, None] & (first_bn == last_bn)[:, None, :]
    full_bnn = earlier & inside & (first_bn[:, :, None] == first_bn[:, None, :])

    def same_document(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (doc_ids_bt[b, q] == doc_ids_bt[b, k])

    return BlockMask(
        (length, length),
        *_listed(some_bnn & ~full_bnn),
        *_listed(full_bnn),
        *_listed((some_bnn & ~full_bnn).mT),
        *_listed(full_bnn.mT),
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=same_document,
    )


def _bounds(doc_ids_bt: Tensor) -> tuple[Tensor, Tensor]:
    """The first and the last document of each block, [B, N]."""
    documents = doc_ids_bt.where(doc_ids_bt >= 0, PADDING)
    blocks = -(-documents.shape[1] // BLOCK)
    padded = F.pad(documents, (0, blocks * BLOCK - documents.shape[1]), value=PADDING + 1)
    parts = padded.view(-1, blocks, BLOCK)
    return parts[..., 0], parts[..., -1]


def _listed(chosen_bnn: Tensor) -> tuple[Tensor, Tensor]:
    """How many columns of each row are chosen, [B, 1, N], and the columns, the chosen ones first, [B, 1, N, N]."""
    counts = chosen_bnn.sum(-1, dtype=torch.int32)
    columns = torch.argsort(chosen_bnn, dim=-1, descending=True, stable=True).to(torch.int32)
    return counts.unsqueeze(1), columns.unsqueeze(1).contiguous()


def attention(q_bhte: Tensor, k_bkte: Tensor, v_bkte: Tensor, mask: Mask) -> Tensor:
    """Scaled dot-product attention over `mask`, or causal over the whole row without one: [B, H, T, E].

    With a dense mask the key-value heads are repeated: the CUDA kernels for one that save memory have no grouped heads.
    """
    groups = q_bhte.shape[1] // k_bkte.shape[1]
    if mask is None:
        return F.scaled_dot_product_attention(q_bhte, k_bkte, v_bkte, is_causal=True, enable_gqa=groups > 1)
    if isinstance(mask, BlockMask):
        return _flex()(q_bhte, k_bkte, v_bkte, block_mask=mask, enable_gqa=groups > 1)
    if groups > 1:
        k_bkte, v_bkte = (x.repeat_interleave(groups, dim=1) for x in (k_bkte, v_bkte))
    return F.scaled_dot_product_attention(q_bhte, k_bkte, v_bkte, attn_mask=mask)


def _flex() -> Callable[..., Any]:
    """FlexAttention is a kernel only when compiled; inside a compiled block it is part of that."""
    return flex_attention if torch.compiler.is_compiling() else _compiled_flex()


@cache
def _compiled_flex() -> Callable[..., Any]:
    return torch.compile(flex_attention)
