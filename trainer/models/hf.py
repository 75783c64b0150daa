"""Between a Decoder and Hugging Face's files: shapes from config.json, weights from and to safetensors.

Every tensor is spoken of by Hugging Face's name, whatever wraps the model: DDP, FSDP, checkpointing or compile.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from trainer.dist import Dist, on_rank0, rank0_first
from trainer.models.decoder import Decoder, DecoderShape, RopeScaling
from trainer.models.generate import greedy, sequence_logits
from trainer.parallel import fsdp_modules, local_tensor

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from trainer.schema import ModelConfig

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
INIT_STD = 0.02


class ModelError(Exception):
    """A model that cannot be built, read or written as asked."""


# --- shapes -----------------------------------------------------------------------------------------------------------


def model_folder(name: str, dist: Dist, *, weights: bool = True) -> Path:
    """The local folder of a model given by folder or Hugging Face name, downloaded where needed (rank 0 first)."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_absolute() or name.startswith((".", "~")):
        raise ModelError(f"model.name={name}: there is no such folder")
    return rank0_first(dist, lambda: _download(name, weights))


def _download(name: str, weights: bool) -> Path:
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.jinja", "*.txt", "*.model"] + (["*.safetensors"] if weights else [])
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(
            f"model.name={name} is no folder here and could not be fetched from Hugging Face: {reason};"
            " give a local folder, or check the name, the network and HF_TOKEN"
        ) from error


def shape_from_config(config: ModelConfig, vocab_size: int, *, folder: Path | None = None) -> DecoderShape:
    """The shape of the configured model: of `folder` (or config.name) when it has a name, else from the fields.

    `vocab_size` is the tokenizer's; a named model must have at least as many rows in its embedding.
    """
    if config.name is not None:
        return shape_from_pretrained(folder or config.name, vocab_size)
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
            f"model.hidden_size={config.hidden_size} is not a multiple of num_heads={config.num_heads}; set model.head_dim"
        )
    return _checked(shape, "the config")


def shape_from_pretrained(source: Path | str, vocab_size: int) -> DecoderShape:
    """The shape that the config.json of a folder or Hugging Face name describes.

    Raises ModelError for an architecture or a feature that Decoder does not compute, naming the field.
    """
    from transformers import AutoConfig

    try:
        hf = AutoConfig.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise ModelError(f"{source}: no usable config.json: {str(error).strip().splitlines()[0]}") from error
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
    if hf.model_type not in ("qwen2", "qwen3", "llama"):
        raise ModelError(f"{source}: model_type={hf.model_type} is not supported; qwen2, qwen3 and llama are")
    expected = {
        "hidden_act": ("silu",),
        "use_sliding_window": (False, None),
        "attention_dropout": (0, 0.0, None),
        "mlp_bias": (False, None),
        "quantization_config": (None,),
        "partial_rotary_factor": (1, None),
    }
    if hf.model_type != "qwen2":
        expected["attention_bias"] = (False, None)
    for field, allowed in expected.items():
        value = getattr(hf, field, None)
        if value not in allowed and not (field == "hidden_act" and value is None):
            raise ModelError(f"{source}: {field}={value} is not supported; only {allowed[0]} is")
    other = sorted(set(getattr(hf, "layer_types", None) or []) - {"full_attention"})
    if other:
        raise ModelError(f"{source}: layer_types has {', '.join(other)}; only full_attention is supported")


def _rope(hf: PretrainedConfig, source: Path | str) -> tuple[float, RopeScaling | None]:
    """Theta and scaling, from transformers 5's rope_parameters or 4's rope_theta and rope_scaling."""
    fields = dict(getattr(hf, "rope_parameters", None) or getattr(hf, "rope_scaling", None) or {})
    theta = fields.get("rope_theta") or getattr(hf, "rope_theta", 10000.0)
    kind = fields.get("rope_type") or fields.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling("linear", fields["factor"])
    if kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        return theta, RopeScaling("llama3", *(fields[name] for name in names))
    raise ModelError(f"{source}: rope_type={kind} is not supported; default, linear and llama3 are")


def shape_to_hf_config(shape: DecoderShape) -> PretrainedConfig:
    """The transformers config of the same model."""
    from transformers import LlamaConfig, Qwen2Config, Qwen3Config

    kind = {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "llama": LlamaConfig}[shape.family]
    names = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}
    return kind(
        architectures=[names[shape.family]],
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
        **_rope_fields(shape),
    )


def _rope_fields(shape: DecoderShape) -> dict[str, Any]:
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


# --- weights of a possibly sharded model ------------------------------------------------------------------------------


def named_weights(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Hugging Face's name of every parameter, with the parameter as it is stored (a DTensor when sharded)."""
    for group in fsdp_modules(module):
        group.reshard()  # after an evaluation the root group is still gathered
    for name, parameter in module.named_parameters():
        yield name.removeprefix("module."), parameter


def own_slices(parameter: Tensor) -> tuple[slice, ...]:
    """The region of the full tensor that this rank stores."""
    shape, offset = tuple(parameter.shape), (0,) * parameter.dim()
    if isinstance(parameter, DTensor):
        shape, offset = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
    return tuple(slice(start, start + length) for start, length in zip(offset, shape, strict=True))


@torch.no_grad()
def init_random(module: nn.Module, seed: int, dist: Dist) -> None:
    """Fill the model with N(0, 0.02) matrices, norms of 1 and biases of 0: the same for any number of ranks."""
    for name, parameter in named_weights(module):
        value = _initial_value(name, tuple(parameter.shape), seed)
        local_tensor(parameter).copy_(value[own_slices(parameter)])


def _initial_value(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    if len(shape) == 1:
        return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:7], "big"))
    return torch.empty(shape, device="cpu").normal_(std=INIT_STD, generator=generator)


@torch.no_grad()
def load_pretrained(module: nn.Module, folder: Path | str, dist: Dist) -> None:
    """Fill the model from a folder's safetensors; each rank reads its own share of each tensor, as fp32.

    Raises ModelError when the folder has no weights, or its names or shapes are not exactly the model's.
    """
    weights = dict(named_weights(module))
    with ExitStack() as stack:
        files = _open_safetensors(Path(folder), stack)
        _check_names(set(weights), set(files), Path(folder))
        for name, parameter in weights.items():
            stored = files[name].get_slice(name)
            if tuple(stored.get_shape()) != tuple(parameter.shape):
                raise ModelError(
                    f"{folder}: {name} has shape {list(stored.get_shape())}, the model needs {list(parameter.shape)}"
                )
            local = local_tensor(parameter)
            if local.numel():
                local.copy_(stored[own_slices(parameter)])


def _open_safetensors(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """The open file of each tensor name."""
    if (folder / INDEX_FILE).is_file():
        names = sorted(set(json.loads((folder / INDEX_FILE).read_text())["weight_map"].values()))
    elif (folder / SINGLE_FILE).is_file():
        names = [SINGLE_FILE]
    else:
        found = ", ".join(sorted(path.name for path in folder.glob("*")) if folder.is_dir() else []) or "nothing"
        raise ModelError(
            f"{folder} has no weights: {SINGLE_FILE} or {INDEX_FILE} expected, found {found};"
            " set model.init=random to start from its config alone"
        )
    files: dict[str, Any] = {}
    for name in names:
        try:
            file = stack.enter_context(safe_open(folder / name, framework="pt", device="cpu"))
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{folder / name} cannot be read as safetensors: {error}") from error
        files.update(dict.fromkeys(file.keys(), file))
    return files


def _check_names(expected: set[str], found: set[str], folder: Path) -> None:
    """The names must match. Allowed beside them: old rotary buffers, and the head of a tied model, which is a copy."""
    ignored = {name for name in found if name.endswith("rotary_emb.inv_freq")}
    if "lm_head.weight" not in expected:
        ignored.add("lm_head.weight")
    missing, unexpected = sorted(expected - found), sorted(found - expected - ignored)
    if missing or unexpected:
        raise ModelError(
            f"{folder}: the weights are not this model's. Missing: {', '.join(missing) or 'none'}."
            f" Unexpected: {', '.join(unexpected) or 'none'}"
        )


@torch.no_grad()
def gather_full(module: nn.Module, dist: Dist) -> dict[str, Tensor] | None:
    """All weights as CPU fp32 tensors under Hugging Face's names on rank 0, None elsewhere. Every rank must call it.

    One tensor at a time is whole on the device.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter in named_weights(module):
        full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        if dist.is_main:
            tensors[name] = full.detach().to("cpu", torch.float32, copy=True)
    return tensors if dist.is_main else None


# --- export -----------------------------------------------------------------------------------------------------------


def export_model(
    folder: Path,
    module: nn.Module,
    *,
    shape: DecoderShape,
    tokenizer: PreTrainedTokenizerBase | None,
    prompt_ids: Sequence[int],
    dist: Dist,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write the model in Hugging Face's format; `folder` appears, or is replaced, only after it has been verified.

    Every rank must call it; all return when it is done, or raise.
    """
    tensors = gather_full(module, dist)

    def write() -> None:
        assert tensors is not None
        partial = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        write_export(partial, shape, tensors=tensors, tokenizer=tokenizer, dtype=dtype)
        verify_export(partial, shape, tensors=tensors, prompt_ids=prompt_ids)
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(partial, folder)

    on_rank0(dist, write)


def write_export(
    folder: Path,
    shape: DecoderShape,
    *,
    tensors: Mapping[str, Tensor],
    tokenizer: PreTrainedTokenizerBase | None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write safetensors (shards of 5 GB), config.json, generation_config.json and the tokenizer's files.

    Raises ModelError for a tensor that is not finite in `dtype`; nothing is written then.
    """
    from huggingface_hub import save_torch_state_dict
    from transformers import GenerationConfig

    bad = [name for name, tensor in tensors.items() if not tensor.to(dtype).isfinite().all()]
    if bad:
        raise ModelError(f"not exported: {', '.join(bad)} has values that are not finite")
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}
    save_torch_state_dict(state, folder, metadata={"format": "pt"}, max_shard_size="5GB")
    special = _special_tokens(tokenizer)
    config = shape_to_hf_config(shape).to_dict() | special | _rope_fields(shape)
    # both spellings: transformers 4 and vLLM read torch_dtype, transformers 5 reads dtype
    config["dtype"] = config["torch_dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    GenerationConfig(**special).save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def _special_tokens(tokenizer: PreTrainedTokenizerBase | None) -> dict[str, int | None]:
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {name: getattr(tokenizer, name, None) for name in names}


def plain_decoder(shape: DecoderShape, tensors: Mapping[str, Tensor]) -> Decoder:
    """An unsharded fp32 Decoder on the CPU that uses the given tensors."""
    with torch.device("meta"):
        decoder = Decoder(shape)
    decoder.load_state_dict(dict(tensors), strict=True, assign=True)
    decoder.reset_buffers(torch.device("cpu"))
    return decoder


@torch.no_grad()
def verify_export(
    folder: Path, shape: DecoderShape, *, tensors: Mapping[str, Tensor], prompt_ids: Sequence[int], n: int = 20
) -> None:
    """Open an export with transformers, and compare weights, logits and `n` greedy tokens with ours.

    Raises ModelError on missing or unexpected names, logits further apart than 1e-4 of their scale, or another token.
    """
    from transformers import AutoModelForCausalLM

    theirs, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    wrong = {key: sorted(map(str, names)) for key, names in info.items() if names}
    if wrong:
        raise ModelError(f"the export in {folder} does not load in transformers: {wrong}")
    state = theirs.state_dict()
    ours = plain_decoder(shape, {name: state[name] for name in tensors})
    ids = [*prompt_ids, *greedy(ours, prompt_ids, n)]
    expected = sequence_logits(ours, ids)
    got = theirs.eval()(torch.tensor([ids])).logits[0]
    error, limit = (got - expected).abs().max().item(), 1e-4 * max(1.0, expected.abs().max().item())
    if not error <= limit:
        raise ModelError(f"the export in {folder} computes other logits: off by {error:.3g}, allowed {limit:.3g}")
