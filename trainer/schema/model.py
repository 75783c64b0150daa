"""The sections `model` and `lora`: what is trained."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class ModelConfig:
    """Which causal language model is trained: a Hugging Face name or folder, or a fresh one of the given shape."""

    name: str | None = None
    """Hugging Face name or local folder (config.json and safetensors). None: build from the fields below."""
    init: Literal["auto", "pretrained", "random"] = "auto"
    """`auto`: pretrained when `name` is given, random otherwise. `random` with a name takes only its config."""
    family: Literal["qwen2", "qwen3", "llama"] = "qwen3"
    """Architecture and its parameter names: qwen2 has biases on q, k and v; qwen3 norms q and k; llama has neither."""
    hidden_size: int = 128
    """Width of the residual stream."""
    intermediate_size: int = 384
    """Width inside the gated MLP."""
    num_layers: int = 4
    """Transformer blocks."""
    num_heads: int = 4
    """Query heads of each block."""
    num_kv_heads: int = 2
    """Key-value heads; it must divide num_heads."""
    head_dim: int | None = None
    """None: hidden_size / num_heads."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    rms_norm_eps: float = 1e-6
    """Added to the mean square in every norm."""
    tie_embeddings: bool = True
    """The embedding matrix is the output head as well."""
    max_position_embeddings: int = 4096
    """Positions that the model is said to know; data.seq_len may not be more."""
    freeze: list[str] = field(default_factory=list)
    """Parameters that stay as they are: patterns (`*`, `?`, `[0-3]`) of Hugging Face's parameter names, such as
    `model.embed_tokens.*`. Not together with `lora`, which freezes the whole model."""


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters beside a frozen model, in PEFT's terms and file format. None without `rank` or `adapter`."""

    rank: int | None = None
    """Rows of A and columns of B; None: that of `adapter`, or no LoRA at all."""
    alpha: float | None = None
    """The adapter's output is scaled by alpha / rank; None: that of `adapter`, else 16."""
    dropout: float | None = None
    """Share of the adapter's input that is dropped in training; None: that of `adapter`, else 0."""
    rslora: bool | None = None
    """Scale by alpha / sqrt(rank) instead; None: as `adapter` does, else false."""
    targets: list[str] = field(default_factory=list)
    """Names of the linear modules that get an adapter: `q_proj`, a whole name, a pattern (`model.layers.[0-3].*`), or
    `all-linear`: every one but the head. Empty: those of `adapter`, else all-linear."""
    adapter: str | None = None
    """Folder of a PEFT adapter to start from (adapter_config.json and adapter_model.safetensors)."""
    merge_export: bool = False
    """Export also the whole model with the adapters added to its weights; export/adapter is written always."""
    base_dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Storage of the frozen model; the adapters are fp32. `auto`: bf16 when train.precision is bf16: products and so
    losses are the same, but a merged export then holds the model's weights as bf16 has them."""
