"""The shape of a Decoder: as a value, from a config, a folder or a Hugging Face name, and as transformers' config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from trainer.dist import Dist
from trainer.errors import ModelError
from trainer.files import expanded
from trainer.models.families.decoder import Decoder
from trainer.models.hf import fetch_model
from trainer.words import first_line

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from trainer.schema import Config, ModelConfig

FAMILIES = ("qwen2", "qwen3", "llama")
SUPPORTED = f"{', '.join(FAMILIES[:-1])} and {FAMILIES[-1]}"


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

    family: Literal["qwen2", "qwen3", "llama"]
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
            return sum(parameter.numel() for parameter in self.build().parameters())

    def build(self, compute_dtype: torch.dtype = torch.float32) -> Decoder:
        return Decoder(self, compute_dtype=compute_dtype)

    def few_blocks(self, most: int) -> DecoderShape:
        return replace(self, num_layers=min(most, self.num_layers), vocab_size=16)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def hf_class(self) -> str:
        return {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}[self.family]

    def hf_config(self) -> PretrainedConfig:
        return shape_to_hf_config(self)

    def hf_fields(self) -> dict[str, Any]:
        return self.hf_config().to_dict() | rope_fields(self)


class DecoderFamily:
    """Qwen2, Qwen3 and Llama: `trainer.models.protocol.Family`."""

    def folder(self, config: Config, dist: Dist, *, weights: bool = True) -> Path | None:
        if config.model.name is None:
            return None
        return model_folder(config.model.name, dist, weights=weights and config.model.init != "random")

    def shape(self, config: Config, vocab_size: int, *, folder: Path | None) -> DecoderShape:
        return shape_from_config(config.model, vocab_size, folder=folder)

    def read_shape(self, values: Mapping[str, Any]) -> DecoderShape:
        scaling = values["rope_scaling"]
        return DecoderShape(**{**values, "rope_scaling": RopeScaling(**scaling) if scaling else None})


DECODERS = DecoderFamily()


# --- from a config or a folder ----------------------------------------------------------------------------------------


def model_folder(name: str, dist: Dist, *, weights: bool = True) -> Path:
    """The local folder of a model given by folder or Hugging Face name. Raises ModelError for one that Decoder does not
    compute."""
    return fetch_model(name, dist, check=read_model_config, weights=weights)


def shape_from_config(config: ModelConfig, vocab_size: int, *, folder: Path | None = None) -> DecoderShape:
    """The shape of the configured model: of `folder` (or config.name) when it has a name, else from the fields.

    `vocab_size` is the tokenizer's; a named model must have at least as many rows in its embedding.
    """
    if config.name is not None:
        return shape_from_pretrained(folder or expanded(config.name), vocab_size)
    head_dim = config.head_dim or config.hidden_size // config.num_heads
    shape = DecoderShape(
        family=config.family,
        vocab_size=vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=head_dim,
        rope_theta=config.rope_theta,
        rms_norm_eps=config.rms_norm_eps,
        tie_embeddings=config.tie_embeddings,
        max_position_embeddings=config.max_position_embeddings,
    )
    if config.head_dim is None and config.hidden_size % config.num_heads:
        raise ModelError(
            f"model.hidden_size={config.hidden_size} is not a multiple of model.num_heads={config.num_heads};"
            " set model.head_dim"
        )
    return _checked(shape, "the config")


def read_model_config(folder: Path) -> dict[str, Any]:
    """What the config.json of a model says. Raises ModelError for a model type that Decoder does not compute.

    transformers is not asked which class that takes: for a type that it does not know it offers on the terminal to run
    the folder's own code.
    """
    try:
        config = json.loads((folder / "config.json").read_bytes())
        kind = config.get("model_type")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ModelError(f"{folder}: no usable config.json: {first_line(error)}") from error
    if kind not in FAMILIES:
        raise ModelError(f"{folder}: model_type={kind} is not supported; {SUPPORTED} are")
    if config.get("auto_map"):
        raise ModelError(
            f"{folder}: its config.json has auto_map, for code of the model's own, and no such code is ever run; "
            f"models of the types {SUPPORTED} as transformers computes them are supported",
            hint=f"if it is a plain {kind}, take auto_map out of a copy of its config.json",
        )
    return dict(config)


def shape_from_pretrained(source: Path, vocab_size: int) -> DecoderShape:
    """The shape that the config.json of a folder describes.

    Raises ModelError for an architecture or a feature that Decoder does not compute, naming the field.
    """
    config = read_model_config(source)
    try:
        hf = _config_class(config["model_type"]).from_dict(config)
    except Exception as error:  # transformers 5 checks the types of the values, with errors of its own
        raise ModelError(f"{source}: no usable config.json: {first_line(error)}") from error
    _refuse_unsupported(hf, source)
    theta, scaling = _rope(hf, source)
    if hf.vocab_size < vocab_size:
        raise ModelError(
            f"{source}: vocab_size={hf.vocab_size} is less than the tokenizer's {vocab_size} tokens;"
            " use the model's own tokenizer"
        )
    shape = DecoderShape(
        family=hf.model_type,
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        num_layers=hf.num_hidden_layers,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_key_value_heads,
        head_dim=getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        rope_theta=theta,
        rope_scaling=scaling,
        rms_norm_eps=hf.rms_norm_eps,
        tie_embeddings=hf.tie_word_embeddings,
        max_position_embeddings=hf.max_position_embeddings,
    )
    return _checked(shape, source)


def _checked(shape: DecoderShape, where: object) -> DecoderShape:
    if shape.num_heads % shape.num_kv_heads:
        raise ModelError(f"{where}: num_heads={shape.num_heads} is not a multiple of num_kv_heads={shape.num_kv_heads}")
    if shape.head_dim % 2:
        raise ModelError(f"{where}: head_dim={shape.head_dim} is odd; rotary embedding needs pairs")
    return shape


def _refuse_unsupported(hf: PretrainedConfig, source: Path | str) -> None:
    expected = {
        "hidden_act": ("silu", None),
        "use_sliding_window": (False, None),
        "attention_dropout": (0.0, None),
        "mlp_bias": (False, None),
        "quantization_config": (None,),
        "partial_rotary_factor": (1, None),
    }
    if hf.model_type != "qwen2":
        expected["attention_bias"] = (False, None)
    for field, allowed in expected.items():
        value = getattr(hf, field, None)
        if value not in allowed:
            raise ModelError(f"{source}: {field}={value} is not supported; only {allowed[0]} is")
    other = sorted(set(getattr(hf, "layer_types", None) or []) - {"full_attention"})
    if other:
        raise ModelError(f"{source}: layer_types has {', '.join(other)}; only full_attention is supported")


def _rope(hf: PretrainedConfig, source: Path | str) -> tuple[float, RopeScaling | None]:
    """Theta and scaling, from transformers 5's rope_parameters or 4's rope_theta and rope_scaling."""
    fields: dict[str, Any] = dict(getattr(hf, "rope_parameters", None) or getattr(hf, "rope_scaling", None) or {})
    default: float = getattr(hf, "rope_theta", 10000.0)
    theta: float = fields.get("rope_theta") or default
    kind = fields.get("rope_type") or fields.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling("linear", fields["factor"])
    if kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        return theta, RopeScaling("llama3", *(fields[name] for name in names))
    raise ModelError(f"{source}: rope_type={kind} is not supported; default, linear and llama3 are")


# --- as Hugging Face says it ------------------------------------------------------------------------------------------


def shape_to_hf_config(shape: DecoderShape) -> PretrainedConfig:
    """The transformers config of the same model."""
    config: PretrainedConfig = _config_class(shape.family)(
        architectures=[shape.hf_class],
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.rms_norm_eps,
        tie_word_embeddings=shape.tie_embeddings,
        max_position_embeddings=shape.max_position_embeddings,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **rope_fields(shape),
    )
    return config


def _config_class(family: str) -> Any:
    from transformers import LlamaConfig, Qwen2Config, Qwen3Config

    return {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "llama": LlamaConfig}[family]


def rope_fields(shape: DecoderShape) -> dict[str, Any]:
    """rope_theta and rope_scaling as transformers 4, vLLM and others read them; transformers 5 takes them too."""
    scaling = shape.rope_scaling
    if scaling is None:
        return {"rope_theta": shape.rope_theta, "rope_scaling": None}
    fields: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        fields["low_freq_factor"] = scaling.low_freq_factor
        fields["high_freq_factor"] = scaling.high_freq_factor
        fields["original_max_position_embeddings"] = scaling.original_max_position
    return {"rope_theta": shape.rope_theta, "rope_scaling": fields}
