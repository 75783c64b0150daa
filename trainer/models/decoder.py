"""Decoder-only transformers of the Qwen2, Qwen3 and Llama families, with Hugging Face's parameter names.

Precision is the same on every backend: parameters are fp32 and take part in a product in `compute_dtype` (cast in the
forward pass, or by FSDP when it gathers them); the residual stream is in `compute_dtype` as in Hugging Face's bf16
models; norm statistics, rotary embedding, softmax and loss are fp32.

Shapes: B rows, T positions, D hidden, H query heads, E head_dim, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.models.attention import Mask, Tiles, attention, document_blocks, document_mask

if TYPE_CHECKING:
    from trainer.models.lora import LoraSpec

Family = Literal["qwen2", "qwen3", "llama"]


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched for contexts longer than those of pretraining."""

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True)
class DecoderShape:
    """Everything that decides a decoder's parameters and its function."""

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-6
    tie_embeddings: bool = True
    max_position_embeddings: int = 4096

    @property
    def qkv_bias(self) -> bool:
        return self.family == "qwen2"

    @property
    def qk_norm(self) -> bool:
        return self.family == "qwen3"

    @property
    def num_params(self) -> int:
        """Number of parameters, a tied matrix counted once."""
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in Decoder(self).parameters())


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
    """Long waves slowed by the factor, short ones kept, those between interpolated (Llama 3.1's rule)."""
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_max_position / wavelengths
    weight = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    weight = weight.clamp(0.0, 1.0)
    return (1 - weight) * frequencies / scaling.factor + weight * frequencies


def rotate(x_bhte: Tensor, cos_bte: Tensor, sin_bte: Tensor) -> Tensor:
    """Rotary embedding in fp32, back in the input's dtype; the tables are of half the width, for pairs of head dims."""
    first, second = x_bhte.float().chunk(2, dim=-1)
    cos, sin = cos_bte.unsqueeze(1), sin_bte.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_bhte.dtype)


def logits_head(hidden: Tensor, head_weight: Tensor) -> Tensor:
    """A head for `Decoder.forward`: fp32 logits [B, T, V] of every position."""
    return F.linear(hidden, head_weight.to(hidden.dtype)).float()


# --- modules ----------------------------------------------------------------------------------------------------------


class Linear(nn.Linear):
    """A product in the input's dtype; the parameters are cast when theirs differs."""

    adapter: Callable[[Tensor, Tensor], Tensor] | None = None
    """What is added: of the input and the product, the output. No module, so that no name changes (`models.lora`)."""
    product: Callable[[Tensor, Tensor, Tensor | None], Tensor] = staticmethod(F.linear)
    """Of input, weight and bias in one dtype; another one in `models.float8`."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return self.adapted(x, self.product(x, self.weight.to(x.dtype), bias))

    def adapted(self, x: Tensor, out: Tensor) -> Tensor:
        return out if self.adapter is None else self.adapter(x, out)


def products(x: Tensor, linears: Sequence[Linear]) -> list[Tensor]:
    """What each of the linear modules makes of the same input; in one product where that costs no copy.

    Storage stays as Hugging Face names it. Where a compiled block casts the weights anyway (fp32 parameters, bf16
    products), the compiler writes the casts into one matrix. Gathered weights (FSDP) and stored bf16 ones would have
    to be copied for it. For queries, keys and values alone: one product for gate and up makes a step of 0.5B 4 %
    longer, for the kernel of their gradients then computes each branch for both (H200, torch 2.11).
    """
    if not torch.compiler.is_compiling() or any(linear.weight.dtype == x.dtype for linear in linears):
        return [linear(x) for linear in linears]
    weight = torch.cat([linear.weight.to(x.dtype) for linear in linears])
    biases = [linear.bias.to(x.dtype) for linear in linears if linear.bias is not None]
    out = linears[0].product(x, weight, torch.cat(biases) if biases else None)
    outs = out.split([m.out_features for m in linears], dim=-1)
    return [m.adapted(x, out) for m, out in zip(linears, outs, strict=True)]


class RMSNorm(nn.Module):
    """Root-mean-square norm: statistics in fp32, result in the input's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight.to(x.dtype) * normed.to(x.dtype)


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


class Head(Linear):
    """The output head of an untied model, which runs what is made of the logits: FSDP gathers its weight for that."""

    def forward(self, hidden: Tensor, head: Callable[[Tensor, Tensor], Any] = logits_head) -> Any:
        return head(hidden, self.weight)


class Trunk(nn.Module):
    """What Hugging Face calls `model`: the embedding, the layers and the final norm."""

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


class Decoder(nn.Module):
    """A causal language model. Its parameter names are the keys of Hugging Face's checkpoint, no more and no fewer.

    A tied model has no `lm_head` at all: the head is the embedding's own parameter, which nothing can untie.
    """

    def __init__(self, shape: DecoderShape, *, compute_dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.shape = shape
        self.compute_dtype = compute_dtype
        self.lora: LoraSpec | None = None
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
        """The hidden states [B, T, D] after the final norm, or `head(hidden, head_weight [V, D])` when a head is given.

        The head runs inside this forward because only here FSDP holds its weight gathered. `packed=False` says
        that every row is one document from position 0, padded at its end at most: causal attention alone is then right
        for all but the padding, and faster.
        """
        mask = (document_blocks if self._flex else document_mask)(doc_ids) if packed else None
        hidden = self.model(input_ids, positions, mask, self.compute_dtype)
        if head is None:
            return hidden
        return head(hidden, self.head_weight) if self.shape.tie_embeddings else self.lm_head(hidden, head)

    def pack_with(self, *, flex: bool, tiles: Tiles | None = None) -> None:
        """Say what packed rows go through: FlexAttention with these tile sizes, or a dense mask as at first."""
        self._flex = flex
        for block in self.blocks:
            block.self_attn.tiles = tiles

    @property
    def blocks(self) -> Sequence[Block]:
        return cast("Sequence[Block]", self.model.layers)  # a ModuleList does not say of what it is one

    @property
    def head_weight(self) -> Tensor:
        """The [V, D] matrix from hidden states to logits, tied or own."""
        return self.model.embed_tokens.weight if self.shape.tie_embeddings else self.lm_head.weight

    def reset_buffers(self, device: torch.device) -> None:
        """Compute the rotary frequencies again, after `to_empty` has left them undefined."""
        self.model.inv_freq = rotary_frequencies(self.shape).to(device)
