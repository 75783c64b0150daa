"""Adapters to PEFT's files: written to a temporary folder, reopened, compared, and only then renamed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from trainer.errors import ModelError
from trainer.export.model import Rows, check_logits, plain_model, sequence_logits, write_generation
from trainer.files import remove_tree
from trainer.models.adapter_files import CONFIG_FILE, PREFIX, WEIGHTS_FILE, load_adapter, read_spec, short_names
from trainer.models.hf import named_weights, render_names
from trainer.models.lora import LoraSpec, attach, linear_names, split_adapter
from trainer.models.protocol import Model, Shape
from trainer.words import first_few

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def export_adapter(
    folder: Path,
    tensors: Mapping[str, Tensor],
    *,
    spec: LoraSpec,
    shape: Shape,
    base_name: str | None,
    tokenizer: PreTrainedTokenizerBase | None,
    rows: Rows,
    generation: Mapping[str, Any] | None = None,
) -> list[list[int]]:
    """Write the adapters in PEFT's format, and the tokenizer; `folder` appears only after verification.

    `tensors`: those of the whole model and its adapters, on the CPU. Returns our model's prediction after each token
    of `rows`.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    remove_tree(partial)
    _, pairs = split_adapter(tensors)
    write_adapter(partial, pairs, spec=spec, shape=shape, base_name=base_name)
    if tokenizer is not None:
        tokenizer.save_pretrained(partial)
    if generation is not None:  # for GenerationConfig.from_pretrained: the base's may have other end tokens
        write_generation(partial, generation)
    predicted = verify_adapter(partial, tensors, spec=spec, shape=shape, rows=rows)
    remove_tree(folder)
    partial.replace(folder)
    return predicted


def write_adapter(
    folder: Path, pairs: Mapping[str, Tensor], *, spec: LoraSpec, shape: Shape, base_name: str | None
) -> None:
    """Write the two files. Raises ModelError for a tensor that is not finite, before it writes anything."""
    bad = [name for name, tensor in pairs.items() if not tensor.isfinite().all()]
    if bad:
        raise ModelError(f"not exported: {first_few(bad, 5)} has values that are not finite")
    folder.mkdir(parents=True)
    save_file(
        {PREFIX + name: tensor.contiguous() for name, tensor in pairs.items()},
        folder / WEIGHTS_FILE,
        metadata={"format": "pt"},
    )
    config = peft_config(spec, shape, base_name)
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def peft_config(spec: LoraSpec, shape: Shape, base_name: str | None) -> dict[str, Any]:
    """The adapter_config.json of an adapter."""
    with torch.device("meta"):
        names = linear_names(shape.build())
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "inference_mode": True,
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "lora_dropout": spec.dropout,
        "use_rslora": spec.rslora,
        "target_modules": short_names(spec.targets, names),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
    }


@torch.no_grad()
def verify_adapter(
    folder: Path, tensors: Mapping[str, Tensor], *, spec: LoraSpec, shape: Shape, rows: Rows
) -> list[list[int]]:
    """Reopen an adapter, with PEFT if it is installed, and compare names, tensors, and a forward pass over each row.

    Raises ModelError for a different tensor, or for logits that differ by more than 1e-4 of their scale. Returns our
    most probable token after each token of the rows.
    """
    base, pairs = split_adapter(tensors)
    ours = plain_adapted(shape, tensors, spec)
    expected = [sequence_logits(ours, ids) for ids in rows]
    read = _logits_of_peft if find_spec("peft") else _logits_of_files
    return check_logits(read(folder, shape, base, pairs, rows), expected, f"the adapter in {folder}")


def plain_adapted(shape: Shape, tensors: Mapping[str, Tensor], spec: LoraSpec) -> Model:
    """An unsharded fp32 model on the CPU with the given tensors, including adapters."""
    base, pairs = split_adapter(tensors)
    model = plain_model(shape, base)
    attach(model, spec)
    model.load_state_dict({**base, **pairs}, strict=True, assign=True)
    return model.eval()


def _logits_of_peft(
    folder: Path, shape: Shape, base: Mapping[str, Tensor], pairs: Mapping[str, Tensor], rows: Rows
) -> list[Tensor]:
    """PEFT's logits for the folder over the base, after a comparison of its tensors."""
    import transformers
    from peft import PeftModel, get_peft_model_state_dict

    kind = getattr(transformers, str(shape.hf_class))
    model = kind.from_pretrained(None, config=shape.hf_config(), state_dict=dict(base), dtype=torch.float32)
    adapted = PeftModel.from_pretrained(model, folder)
    loaded = {name.removeprefix(PREFIX): value for name, value in get_peft_model_state_dict(adapted).items()}
    _check_tensors(folder, loaded, pairs)
    return [adapted.eval()(torch.tensor([list(ids)])).logits[0] for ids in rows]


def _logits_of_files(
    folder: Path, shape: Shape, base: Mapping[str, Tensor], pairs: Mapping[str, Tensor], rows: Rows
) -> list[Tensor]:
    """The logits from the folder as our reader loads it; used if PEFT is not installed."""
    model = plain_model(shape, base)
    spec = read_spec(folder, linear_names(model))
    attach(model, spec)
    load_adapter(model, folder)
    _check_tensors(folder, split_adapter(dict(named_weights(model)))[1], pairs)
    return [sequence_logits(model.eval(), ids) for ids in rows]


def _check_tensors(folder: Path, loaded: Mapping[str, Tensor], written: Mapping[str, Tensor]) -> None:
    missing, unexpected = sorted(written.keys() - loaded.keys()), sorted(loaded.keys() - written.keys())
    changed = [name for name in written.keys() & loaded.keys() if not torch.equal(loaded[name], written[name])]
    if missing or unexpected or changed:
        raise ModelError(
            f"the adapter in {folder} is not what was written. {render_names(missing, unexpected)}"
            f" Changed: {first_few(changed, 3) or 'none'}"
        )
