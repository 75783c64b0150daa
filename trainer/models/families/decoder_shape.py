"""The shape of a Decoder: as a value, from a config, a folder or a Hugging Face name, and as transformers' config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch

from trainer.dist import Dist
from trainer.errors import ModelError
from trainer.files import expanded
from trainer.models.families.decoder import Decoder
from trainer.models.generation import read_generation
from trainer.models.hf import CONFIG_FILE, fetch_model
from trainer.typed import InvalidData, Within, from_json, read_json
from trainer.words import first_few, first_line, shortened

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from trainer.schema import Config, ModelConfig

FAMILIES = ("qwen2", "qwen3", "llama")
SUPPORTED = f"{', '.join(FAMILIES[:-1])} and {FAMILIES[-1]}"

# A larger number is damaged, and no model: even without storage, each layer becomes a module.
Layers = Annotated[int, Within(1, 4096)]
Width = Annotated[int, Within(1, 1 << 24)]
Number = Annotated[int, Within(1, 1 << 31)]
Positive = Annotated[float, Within(1e-12, 1e12)]


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched for contexts longer than those of pretraining."""

    kind: Literal["linear", "llama3"]
    factor: Positive
    low_freq_factor: Positive = 1.0
    high_freq_factor: Positive = 4.0
    original_max_position: Number = 8192


@dataclass(frozen=True)
class DecoderShape:
    """Everything that decides a decoder's parameters and its function."""

    family: Literal["qwen2", "qwen3", "llama"]
    vocab_size: Number
    hidden_size: Width
    intermediate_size: Width
    num_layers: Layers
    num_heads: Width
    num_kv_heads: Width
    head_dim: Width
    rope_theta: Positive = 10000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: Annotated[float, Within(0, 1)] = 1e-6
    tie_embeddings: bool = True
    max_position_embeddings: Number = 4096

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


@dataclass(frozen=True)
class RopeFields:
    """The keys of transformers 5's rope_parameters and of 4's rope_scaling."""

    rope_theta: Positive | None = None
    rope_type: str | None = None
    type: str | None = None
    factor: Positive | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    original_max_position_embeddings: Number | None = None

    @property
    def kind(self) -> str:
        return self.rope_type or self.type or "default"


@dataclass(frozen=True)
class ModelFile:
    """The keys of a config.json that are read here; a missing key has its family's default."""

    model_type: Literal["qwen2", "qwen3", "llama"]
    vocab_size: Number | None = None
    hidden_size: Width | None = None
    intermediate_size: Width | None = None
    num_hidden_layers: Layers | None = None
    num_attention_heads: Width | None = None
    num_key_value_heads: Width | None = None
    head_dim: Width | None = None
    rms_norm_eps: Annotated[float, Within(0, 1)] | None = None
    tie_word_embeddings: bool | None = None
    max_position_embeddings: Number | None = None
    rope_theta: Positive | None = None
    rope_parameters: RopeFields | None = None
    rope_scaling: RopeFields | None = None
    layer_types: tuple[str, ...] | None = None
    hidden_act: str | None = None
    use_sliding_window: bool | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    attention_dropout: float | None = None
    quantization_config: Any = None
    partial_rotary_factor: float | None = None


class DecoderFamily:
    """Qwen2, Qwen3 and Llama: `trainer.models.protocol.Family`."""

    def folder(self, config: Config, dist: Dist, *, weights: bool = True) -> Path | None:
        if config.model.name is None:
            return None
        return model_folder(config.model.name, dist, weights=weights and config.model.init != "random")

    def shape(self, config: Config, vocab_size: int, *, folder: Path | None) -> DecoderShape:
        return shape_from_config(config.model, vocab_size, folder=folder)

    def read_shape(self, values: Mapping[str, Any]) -> DecoderShape:
        return from_json(values, DecoderShape)


DECODERS = DecoderFamily()


# --- from a config or a folder ----------------------------------------------------------------------------------------


def model_folder(name: str, dist: Dist, *, weights: bool = True) -> Path:
    """The local folder of a model given by folder or Hugging Face name. Raises ModelError if Decoder does not support
    the model."""

    def check(folder: Path) -> None:
        read_model_config(folder)
        read_generation(folder)  # the export copies it

    return fetch_model(name, dist, check=check, weights=weights)


def shape_from_config(config: ModelConfig, vocab_size: int, *, folder: Path | None = None) -> DecoderShape:
    """The shape of the configured model: with a name, of `folder` (or config.name), else from the config's fields.

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
    """The config.json of a model. Raises ModelError for a model type that Decoder does not support.

    This does not ask transformers for the class: for an unknown type, transformers asks on the terminal whether to run
    the folder's code.
    """
    path = folder / CONFIG_FILE
    try:
        config: dict[str, Any] = read_json(path, dict[str, Any])
    except OSError as error:
        raise ModelError(f"{folder}: no usable config.json: {error.strerror}") from error
    except InvalidData as damage:
        raise ModelError(f"{path}: {damage}") from None
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise ModelError(f"{folder}: model_type={shortened(kind)} is not supported; {SUPPORTED} are")
    if config.get("auto_map"):
        raise ModelError(
            f"{folder}: its config.json has auto_map, for code of the model's own, and no such code is ever run; "
            f"models of the types {SUPPORTED} as transformers computes them are supported",
            hint=f"if it is a plain {kind}, take auto_map out of a copy of its config.json",
        )
    return config


def shape_from_pretrained(source: Path, vocab_size: int) -> DecoderShape:
    """The shape that the config.json of a folder describes.

    Raises ModelError that names the field for an architecture or a feature that Decoder does not support.
    """
    config, path = read_model_config(source), source / CONFIG_FILE
    try:
        from_json(config, ModelFile)
        read = {name: value for name, value in config.items() if name in ModelFile.__dataclass_fields__}
        hf = _config_class(config["model_type"]).from_dict(read)  # the class fills in missing keys
        told = from_json({name: getattr(hf, name, None) for name in ModelFile.__dataclass_fields__}, ModelFile)
    except InvalidData as damage:
        raise ModelError(f"{path}: {damage}") from None
    except Exception as error:  # transformers 5 checks related fields, with its own errors
        raise ModelError(f"{path} cannot be used: {first_line(error)}") from error
    _refuse_unsupported(told, source)
    try:
        shape = _shape_of(told, path)
    except InvalidData as damage:
        raise ModelError(f"{path}: {damage}") from None
    if shape.vocab_size < vocab_size:
        raise ModelError(
            f"{source}: vocab_size={shape.vocab_size} is less than the tokenizer's {vocab_size} tokens;"
            " use the model's own tokenizer"
        )
    return _checked(shape, source)


def _shape_of(told: ModelFile, path: Path) -> DecoderShape:
    theta, scaling = _rope(told, path)
    fields = {
        "family": told.model_type,
        "vocab_size": told.vocab_size,
        "hidden_size": told.hidden_size,
        "intermediate_size": told.intermediate_size,
        "num_layers": told.num_hidden_layers,
        "num_heads": told.num_attention_heads,
        "num_kv_heads": told.num_key_value_heads,
        "head_dim": told.head_dim or (told.hidden_size or 0) // (told.num_attention_heads or 1),
        "rope_theta": theta,
        "rms_norm_eps": told.rms_norm_eps,
        "tie_embeddings": told.tie_word_embeddings,
        "max_position_embeddings": told.max_position_embeddings,
    }
    return replace(from_json(fields, DecoderShape), rope_scaling=scaling)


def _checked(shape: DecoderShape, where: object) -> DecoderShape:
    if shape.num_heads % shape.num_kv_heads:
        raise ModelError(f"{where}: num_heads={shape.num_heads} is not a multiple of num_kv_heads={shape.num_kv_heads}")
    if shape.head_dim % 2:
        raise ModelError(f"{where}: head_dim={shape.head_dim} is odd; rotary embedding needs pairs")
    return shape


def _refuse_unsupported(told: ModelFile, source: Path) -> None:
    expected: dict[str, tuple[Any, ...]] = {
        "hidden_act": ("silu", None),
        "use_sliding_window": (False, None),
        "attention_dropout": (0.0, None),
        "mlp_bias": (False, None),
        "quantization_config": (None,),
        "partial_rotary_factor": (1, None),
    }
    if told.model_type != "qwen2":
        expected["attention_bias"] = (False, None)
    for field, allowed in expected.items():
        value = getattr(told, field)
        if value not in allowed:
            raise ModelError(f"{source}: {field}={shortened(value)} is not supported; only {allowed[0]} is")
    other = sorted(set(told.layer_types or ()) - {"full_attention"})
    if other:
        raise ModelError(f"{source}: layer_types has {first_few(other, 5)}; only full_attention is supported")


def _rope(told: ModelFile, path: Path) -> tuple[float, RopeScaling | None]:
    """Theta and scaling, from transformers 5's rope_parameters or 4's rope_theta and rope_scaling."""
    fields = told.rope_parameters or told.rope_scaling or RopeFields()
    theta = fields.rope_theta or told.rope_theta or 10000.0
    if fields.kind == "default":
        return theta, None
    if fields.kind not in ("linear", "llama3"):
        kind = shortened(fields.kind)
        raise ModelError(f"{path.parent}: rope_type={kind} is not supported; default, linear and llama3 are")
    needed = {"factor": fields.factor}
    if fields.kind == "llama3":
        needed |= {name: getattr(fields, name) for name in ("low_freq_factor", "high_freq_factor")}
        needed["original_max_position"] = fields.original_max_position_embeddings
    try:
        return theta, from_json({"kind": fields.kind, **needed}, RopeScaling)
    except InvalidData as damage:
        raise damage.within("rope_scaling") from None


# --- in Hugging Face's form -------------------------------------------------------------------------------------------


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
    """rope_theta and rope_scaling in the form that transformers 4, vLLM, others and also transformers 5 read."""
    scaling = shape.rope_scaling
    if scaling is None:
        return {"rope_theta": shape.rope_theta, "rope_scaling": None}
    fields: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        fields["low_freq_factor"] = scaling.low_freq_factor
        fields["high_freq_factor"] = scaling.high_freq_factor
        fields["original_max_position_embeddings"] = scaling.original_max_position
    return {"rope_theta": shape.rope_theta, "rope_scaling": fields}
