"""Attention within documents: which positions attend to which, and the kernels that compute it.

Rows of one document each need no mask: they use cuDNN's causal attention, the fastest on H100 and H200. Packed rows use
FlexAttention, which skips the blocks of 128 x 128 scores between documents. Where it cannot run, they use a dense mask,
which is equally correct but slow.

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
"""Positions of a block of scores; the kernels' default."""
FLEX_HEAD_DIMS = range(16, 257)
PADDING = 2**40
"""The document number of padding: larger than all others, so that the numbers never decrease along a row. The rest of
the last block, behind the row's end, gets the next number."""
KERNEL_ORDER = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]

_NAMES = (
    *("fwd_BLOCK_M", "fwd_BLOCK_N", "fwd_num_warps", "fwd_num_stages"),
    *("bwd_BLOCK_M1", "bwd_BLOCK_N1", "bwd_BLOCK_M2", "bwd_BLOCK_N2", "bwd_num_warps", "bwd_num_stages"),
)
HOPPER_TILES = {
    64: dict(zip(_NAMES, (64, 64, 4, 3, 64, 64, 64, 64, 4, 2), strict=True)),
    128: dict(zip(_NAMES, (64, 64, 4, 3, 32, 64, 64, 32, 4, 3), strict=True)),
}
"""Tile sizes by the widest head: the best of eight on an H200 (torch 2.11, documents of 256 to 2048 tokens). Forward
and backward take 0.79 ms instead of 1.07 at 8 x 2048 x 14 heads of 64, and 0.59 instead of 0.63 at 4 x 2048 x 12 heads
of 128."""

Mask = Tensor | BlockMask | None
Tiles = dict[str, int]


@contextmanager
def fastest_kernels() -> Iterator[None]:
    """Prefers cuDNN's attention to torch's choice: 1.8 times as fast, forward and backward, on H100 (torch 2.11).

    A compiled region keeps the kernel of its first call, so this context must enclose that call too.
    """
    with sdpa_kernel(KERNEL_ORDER, set_priority=True):
        yield


def why_no_flex(device: torch.device, head_dim: int) -> str | None:
    """Why packed rows cannot use FlexAttention; None if they can."""
    if head_dim not in FLEX_HEAD_DIMS:
        return f"FlexAttention takes no head_dim of {head_dim}"
    return why_no_triton(device)


def tuned_tiles(device: torch.device, head_dim: int) -> Tiles | None:
    """FlexAttention's tile sizes for a card and a head size; None: its default."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return None
    return next((tiles for widest, tiles in HOPPER_TILES.items() if head_dim <= widest), None)


def document_mask(doc_ids_bt: Tensor) -> Tensor:
    """Which position attends to which: [B, 1, T, T] bool, true for the same document and no later position.

    Padding (-1) forms a separate document, so no row of the mask is empty and no softmax is NaN.
    """
    length = doc_ids_bt.shape[1]
    same = doc_ids_bt.unsqueeze(2) == doc_ids_bt.unsqueeze(1)
    causal = torch.ones(length, length, dtype=torch.bool, device=doc_ids_bt.device).tril()
    return (same & causal).unsqueeze(1)


def document_blocks(doc_ids_bt: Tensor) -> BlockMask:
    """The same as `document_mask`, by blocks: none, all or some of their scores count. Does not wait for the device.

    `doc_ids_bt` must not decrease along a row, except for the padding (-1) at its end.
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
    """The number of chosen columns of each row, [B, 1, N], and the columns, chosen ones first, [B, 1, N, N]."""
    counts = chosen_bnn.sum(-1, dtype=torch.int32)
    columns = torch.argsort(chosen_bnn, dim=-1, descending=True, stable=True).to(torch.int32)
    return counts.unsqueeze(1), columns.unsqueeze(1).contiguous()


def attention(q_bhte: Tensor, k_bkte: Tensor, v_bkte: Tensor, mask: Mask, tiles: Tiles | None = None) -> Tensor:
    """Scaled dot-product attention over `mask`; without one, causal over the whole row: [B, H, T, E].

    With a dense mask the key-value heads are repeated: the memory-saving CUDA kernels for it have no grouped heads.
    """
    groups = q_bhte.shape[1] // k_bkte.shape[1]
    if mask is None:
        return F.scaled_dot_product_attention(q_bhte, k_bkte, v_bkte, is_causal=True, enable_gqa=groups > 1)
    if isinstance(mask, BlockMask):
        out: Tensor = _flex()(q_bhte, k_bkte, v_bkte, block_mask=mask, enable_gqa=groups > 1, kernel_options=tiles)
        return out
    if groups > 1:
        k_bkte, v_bkte = (x.repeat_interleave(groups, dim=1) for x in (k_bkte, v_bkte))
    return F.scaled_dot_product_attention(q_bhte, k_bkte, v_bkte, attn_mask=mask)


def _flex() -> Callable[..., Any]:
    """FlexAttention, compiled, because only then it is one kernel; inside a compiled block it becomes part of that."""
    if torch.compiler.is_compiling():
        return flex_attention
    return _compiled_flex()


@cache
def _compiled_flex() -> Callable[..., Any]:
    return torch.compile(flex_attention)
