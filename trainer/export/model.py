"""A model written in Hugging Face's format, and read back with transformers before it counts as written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from trainer.dist import Dist, on_rank0
from trainer.errors import ModelError
from trainer.export.compare import Rows, check_logits, sequence_logits
from trainer.models.decoder import Decoder, DecoderShape
from trainer.models.shapes import rope_fields, shape_to_hf_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def export_tensors(
    folder: Path,
    tensors: Mapping[str, Tensor] | None,
    *,
    shape: DecoderShape,
    tokenizer: PreTrainedTokenizerBase | None,
    rows: Rows,
    dist: Dist,
    dtype: torch.dtype = torch.float32,
) -> list[list[int]]:
    """Write the model in Hugging Face's format; `folder` appears, or is replaced, only after it has been verified.

    `tensors`: whole, on rank 0; None on the other ranks. Every rank must call it; all return when it is done, or raise.
    `rows`: of rank 0, to compare by. Returns what the model predicts after each of their tokens.
    """

    def write() -> list[list[int]]:
        assert tensors is not None
        partial = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        write_export(partial, shape, tensors=tensors, tokenizer=tokenizer, dtype=dtype)
        predicted = verify_export(partial, shape, tensors=tensors, rows=rows, dtype=dtype)
        if folder.exists():
            shutil.rmtree(folder)
        partial.replace(folder)
        return predicted

    return on_rank0(dist, write)


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
    config = shape_to_hf_config(shape).to_dict() | special | rope_fields(shape)
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
    folder: Path,
    shape: DecoderShape,
    *,
    tensors: Mapping[str, Tensor],
    rows: Rows,
    dtype: torch.dtype = torch.float32,
) -> list[list[int]]:
    """Open an export with transformers and compare it with ours: names, weights, and logits of a pass over each row.

    Returns our most probable token after each of a row's. Raises ModelError on missing or unexpected names, another
    weight, or logits further apart than 1e-4 of their scale.
    """
    from transformers import AutoModelForCausalLM

    told = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    theirs, info = cast("tuple[PreTrainedModel, dict[str, Any]]", told)
    wrong = {key: sorted(map(str, names)) for key, names in info.items() if names}
    if wrong:
        raise ModelError(f"the export in {folder} does not load in transformers: {wrong}")
    loaded, written = theirs.state_dict(), {name: tensor.to(dtype).float() for name, tensor in tensors.items()}
    changed = [name for name, tensor in written.items() if not torch.equal(loaded[name], tensor)]
    if changed:
        raise ModelError(f"the export in {folder} holds other weights than were written: {', '.join(changed)}")
    ours = plain_decoder(shape, written)
    expected = [sequence_logits(ours, ids) for ids in rows]
    got = [theirs.eval()(torch.tensor([list(ids)])).logits[0] for ids in rows]
    return check_logits(got, expected, f"the export in {folder}")
