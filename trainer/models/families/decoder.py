"""Decoder-only transformers of the Qwen2, Qwen3 and Llama families, with Hugging Face's parameter names.

Precision is the same on every backend: parameters are fp32 and take part in a product in `compute_dtype` (cast in the
forward pass, or by FSDP when it gathers them); the residual stream is in `compute_dtype` as in Hugging Face's bf16
models; norm statistics, rotary embedding, softmax and loss are fp32.

Shapes: B rows, T positions, D hidden, H query heads, E head_dim, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.models.attention import (
    Mask,
    Tiles,
    attention,
    document_blocks,
    document_mask,
    tuned_tiles,
    why_no_flex,
)
from trainer.models.families.decoder_memory import block_memory, outer_memory
from trainer.models.figures import BlockMemory, Flops, Micro, OuterMemory
from trainer.models.layers import Head, Linear, RMSNorm, products
from trainer.models.protocol import Model, Units

if TYPE_CHECKING:
    from trainer.models.families.decoder_shape import DecoderShape, RopeScaling

HF_FAMILIES = {"qwen2": "Qwen2", "qwen3": "Qwen3", "llama": "Llama"}
HF_CLASSES = {"DecoderLayer": "Block", "Attention": "Attention", "MLP": "MLP", "RMSNorm": "RMSNorm"}


# --- functions --------------------------------------------------------------------------------------------------------


def rotary_frequencies(shape: DecoderShape) -> Tensor:
    """Angle per position of each pair of head dims, [E/2] fp32 on the CPU."""
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.int64, device="cpu").float() / shape.head_dim
    frequencies = 1.0 / (shape.rope_theta**exponents)
    scaling = shape.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    return _llama3_frequencies(frequencies, scaling)


def _llama3_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1's rule: long waves are slowed by the factor, short ones kept, those between interpolated."""
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_max_position / wavelengths
    weight = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    weight = weight.clamp(0.0, 1.0)
    return (1 - weight) * frequencies / scaling.factor + weight * frequencies


def rotate(x_bhte: Tensor, cos_bte: Tensor, sin_bte: Tensor) -> Tensor:
    """Rotary embedding in fp32, returned in the input's dtype. The tables have half the width: one value per pair."""
    first, second = x_bhte.float().chunk(2, dim=-1)
    cos, sin = cos_bte.unsqueeze(1), sin_bte.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_bhte.dtype)


# --- modules ----------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        query_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.head_dim = shape.head_dim
        self.tiles: Tiles | None = None
        self.q_proj = Linear(shape.hidden_size, query_size, bias=shape.qkv_bias)
        self.k_proj = Linear(shape.hidden_size, kv_size, bias=shape.qkv_bias)
        self.v_proj = Linear(shape.hidden_size, kv_size, bias=shape.qkv_bias)
        self.o_proj = Linear(query_size, shape.hidden_size, bias=False)
        if shape.qk_norm:
            self.q_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)
            self.k_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)
        self.qk_norm = shape.qk_norm

    def forward(self, x_btd: Tensor, cos: Tensor, sin: Tensor, mask: Mask) -> Tensor:
        q, k, v = (
            out.unflatten(-1, (-1, self.head_dim)) for out in products(x_btd, (self.q_proj, self.k_proj, self.v_proj))
        )
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = attention(rotate(q, cos, sin), rotate(k, cos, sin), v, mask, self.tiles)
        projected: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return projected


class MLP(nn.Module):
    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.gate_proj = Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, x_btd: Tensor, cos: Tensor, sin: Tensor, mask: Mask) -> Tensor:
        x_btd = x_btd + self.self_attn(self.input_layernorm(x_btd), cos, sin, mask)
        out: Tensor = x_btd + self.mlp(self.post_attention_layernorm(x_btd))
        return out


class Trunk(nn.Module):
    """Hugging Face's `model`: the embedding, the layers and the final norm."""

    inv_freq: Tensor

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.register_buffer("inv_freq", rotary_frequencies(shape), persistent=False)

    def forward(self, input_ids: Tensor, positions: Tensor, mask: Mask, compute_dtype: torch.dtype) -> Tensor:
        angles_bte = positions.unsqueeze(-1).float() * self.inv_freq
        cos, sin = angles_bte.cos(), angles_bte.sin()
        x_btd = self.embed_tokens(input_ids).to(compute_dtype)
        for block in self.layers:
            x_btd = block(x_btd, cos, sin, mask)
        normed: Tensor = self.norm(x_btd)
        return normed


class Decoder(Model):
    """A causal language model. Its parameter names are exactly the keys of Hugging Face's checkpoint.

    A tied model has no `lm_head`: the head is the embedding's parameter, so nothing can untie them.
    """

    def __init__(self, shape: DecoderShape, *, compute_dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.shape: DecoderShape = shape
        self.compute_dtype = compute_dtype
        self._flex = False
        self.model = Trunk(shape)
        if not shape.tie_embeddings:
            self.lm_head = Head(shape.hidden_size, shape.vocab_size, bias=False)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        doc_ids: Tensor,
        *,
        packed: bool = True,
        head: Callable[[Tensor, Tensor], Any] | None = None,
    ) -> Any:
        """The hidden states [B, T, D] after the final norm, or `head(hidden, head_weight [V, D])` if a head is given.

        The head runs inside this forward because only here FSDP holds its weight gathered. `packed=False` means that
        every row is one document from position 0, padded only at its end. Causal attention alone is then correct for
        all positions except the padding, and faster.
        """
        mask = (document_blocks if self._flex else document_mask)(doc_ids) if packed else None
        hidden = self.model(input_ids, positions, mask, self.compute_dtype)
        if head is None:
            return hidden
        return head(hidden, self.head_weight) if self.shape.tie_embeddings else self.lm_head(hidden, head)

    @property
    def blocks(self) -> Sequence[Block]:
        return cast("Sequence[Block]", self.model.layers)  # ModuleList has no element type

    @property
    def head_weight(self) -> Tensor:
        """The [V, D] matrix from hidden states to logits, tied or separate."""
        return self.model.embed_tokens.weight if self.shape.tie_embeddings else self.lm_head.weight

    def units(self) -> Units:
        blocks, trunk = tuple(self.blocks), self.model
        compiled, inside = (*blocks, trunk.norm), (trunk, trunk.layers)
        if self.shape.tie_embeddings:  # the head uses the embedding after its group would be freed
            return Units(sharded=blocks, inseparable=(*inside, trunk.embed_tokens), compiled=compiled)
        # an untied embedding and head are as large as several blocks: in groups of their own they overlap with products
        return Units(sharded=(trunk.embed_tokens, *blocks, self.lm_head), inseparable=inside, compiled=compiled)

    def hf_classes(self) -> dict[str, str]:
        family = HF_FAMILIES[self.shape.family]
        return {f"{family}{theirs}": ours for theirs, ours in HF_CLASSES.items()}

    def choose_kernels(self, device: torch.device) -> None:
        """Use FlexAttention for packed rows if it can run; else the dense mask stays."""
        head_dim = self.shape.head_dim
        self._flex = why_no_flex(device, head_dim) is None
        for block in self.blocks:
            block.self_attn.tiles = tuned_tiles(device, head_dim)

    def reset_buffers(self, device: torch.device) -> None:
        """Compute the rotary frequencies again, after `to_empty` has left them undefined."""
        self.model.inv_freq = rotary_frequencies(self.shape).to(device)

    def flops(self) -> Flops:
        """Operations of a token. An untied embedding is a look-up without products, so it does not count. A frozen
        parameter takes part in two products instead of three: it has no gradient."""
        shape = self.shape
        flops = {
            name: parameter.numel() * (6.0 if parameter.requires_grad else 4.0)
            for name, parameter in self.named_parameters()
            if shape.tie_embeddings or not name.endswith("embed_tokens.weight")
        }
        head = "embed_tokens.weight" if shape.tie_embeddings else "lm_head.weight"
        return Flops(
            products=sum(flops.values()),
            head=sum(count for name, count in flops.items() if name.endswith(head)),
            attention=12.0 * shape.num_layers * shape.num_heads * shape.head_dim,
        )

    def block_memory(self, block: nn.Module, micro: Micro) -> BlockMemory:
        return block_memory(cast("Block", block), self.shape, self.lora, micro)

    def outer_memory(self, micro: Micro) -> OuterMemory:
        return outer_memory(self, micro)
