"""The sections `model` and `lora`: what is trained."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from trainer.schema.key import ABOVE_0, AT_LEAST_1, AT_LEAST_2, EVEN, SHARE, key


@dataclass(frozen=True)
class ModelConfig:
    """Which causal language model is trained: a Hugging Face name or folder, or a fresh one of the given shape."""

    name: str | None = key(None, aliases=("model_name", "model_name_or_path"))
    """Hugging Face name or local folder (config.json and safetensors). None: build from the fields below."""
    init: Literal["auto", "pretrained", "random"] = "auto"
    """`auto`: pretrained when `name` is given, random otherwise. `random` with a name takes only its config."""
    family: Literal["qwen2", "qwen3", "llama"] = "qwen3"
    """Architecture and its parameter names: qwen2 has biases on q, k and v; qwen3 norms q and k; llama has neither."""
    hidden_size: int = key(128, limit=AT_LEAST_1)
    """Width of the residual stream."""
    intermediate_size: int = key(384, limit=AT_LEAST_1)
    """Width inside the gated MLP."""
    num_layers: int = key(4, limit=AT_LEAST_1, aliases=("num_hidden_layers",))
    """Transformer blocks."""
    num_heads: int = key(4, limit=AT_LEAST_1, aliases=("num_attention_heads",))
    """Query heads of each block."""
    num_kv_heads: int = key(2, limit=AT_LEAST_1, aliases=("num_key_value_heads",))
    """Key-value heads; it must divide num_heads."""
    head_dim: int | None = key(None, limit=EVEN)
    """None: hidden_size / num_heads."""
    rope_theta: float = key(10000.0, limit=ABOVE_0)
    """Base of the rotary frequencies."""
    rms_norm_eps: float = key(1e-6, limit=ABOVE_0)
    """Added to the mean square in every norm."""
    tie_embeddings: bool = True
    """The embedding matrix is the output head as well."""
    max_position_embeddings: int = key(4096, limit=AT_LEAST_2)
    """Positions that the model is said to know; data.seq_len may not be more."""
    freeze: list[str] = field(default_factory=list)
    """Parameters that stay as they are: patterns (`*`, `?`, `[0-3]`) of Hugging Face's parameter names, such as
    `model.embed_tokens.*`. Not together with `lora`, which freezes the whole model."""


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters beside a frozen model, in PEFT's terms and file format. There are none unless `rank` or
    `adapter` is set."""

    rank: int | None = key(None, limit=AT_LEAST_1, aliases=("r", "lora_r"))
    """Rows of A and columns of B; None: that of `adapter`, or no LoRA at all."""
    alpha: float | None = key(None, limit=ABOVE_0, aliases=("lora_alpha",))
    """The adapter's output is scaled by alpha / rank; None: that of `adapter`, else 16."""
    dropout: float | None = key(None, limit=SHARE, aliases=("lora_dropout",))
    """Share of the adapter's input that is dropped in training; None: that of `adapter`, else 0."""
    rslora: bool | None = key(None, aliases=("use_rslora",))
    """Scale by alpha / sqrt(rank) instead; None: as `adapter` does, else false."""
    targets: list[str] = key([], aliases=("target_modules", "lora_target_modules"))
    """Names of the linear modules that get an adapter: `q_proj`, a whole name, a pattern (`model.layers.[0-3].*`), or
    `all-linear`: every one but the head. Empty: those of `adapter`, else all-linear."""
    adapter: str | None = None
    """Folder of a PEFT adapter to start from (adapter_config.json and adapter_model.safetensors)."""
    merge_export: bool = False
    """Export also the whole model with the adapters added to its weights; export/adapter is written always."""
    base_dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Storage of the frozen model; the adapters are fp32. `auto`: bf16 when train.precision is bf16. Matrix
    products, and so losses, are the same as with fp32 storage, but a merged export then has the model's weights rounded
    to bf16."""
