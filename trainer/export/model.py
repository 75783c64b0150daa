"""Writes a model in Hugging Face's format, reads it back with transformers and compares it before it is renamed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from inspect import signature
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError
from torch import Tensor

from trainer.batch import Batch
from trainer.dist import Dist, on_rank0
from trainer.errors import ModelError
from trainer.export.generation import SPECIAL
from trainer.files import remove_tree
from trainer.models.generation import GENERATION_FILE
from trainer.models.hf import open_folder
from trainer.models.layers import logits_head
from trainer.models.protocol import Model, Shape
from trainer.words import first_few, first_line, shortened

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ROWS, TOKENS = 2, 64
"""Number of compared rows, and their tokens at most: one difference changes nearly every logit."""

Rows = Sequence[Sequence[int]]


def export_tensors(
    folder: Path,
    tensors: Mapping[str, Tensor] | None,
    *,
    shape: Shape,
    tokenizer: PreTrainedTokenizerBase | None,
    rows: Rows,
    dist: Dist,
    dtype: torch.dtype = torch.float32,
    generation: Mapping[str, Any] | None = None,
) -> list[list[int]]:
    """Write the model in Hugging Face's format; `folder` appears, or is replaced, only after verification.

    `tensors`: whole, on rank 0; None on the other ranks. Every rank must call it; all return when it is done, or raise.
    `rows`: on rank 0, the tokens of the comparison. Returns the model's prediction after each of these tokens.
    """

    def write() -> list[list[int]]:
        assert tensors is not None
        partial = folder.with_name(f".{folder.name}.partial")
        remove_tree(partial)
        write_export(partial, shape, tensors=tensors, tokenizer=tokenizer, dtype=dtype, generation=generation)
        predicted = verify_export(partial, shape, tensors=tensors, rows=rows, dtype=dtype)
        if folder.exists():
            remove_tree(folder)
        partial.replace(folder)
        return predicted

    return on_rank0(dist, write)


def write_export(
    folder: Path,
    shape: Shape,
    *,
    tensors: Mapping[str, Tensor],
    tokenizer: PreTrainedTokenizerBase | None,
    dtype: torch.dtype = torch.float32,
    generation: Mapping[str, Any] | None = None,
) -> None:
    """Write safetensors (shards of 5 GB), config.json, generation_config.json and the tokenizer's files.

    `generation`: the content of generation_config.json; by default the tokenizer's special tokens.
    Raises ModelError for a tensor that is not finite in `dtype`, before it writes anything.
    """
    from huggingface_hub import save_torch_state_dict

    bad = [name for name, tensor in tensors.items() if not tensor.to(dtype).isfinite().all()]
    if bad:
        raise ModelError(f"not exported: {first_few(bad, 5)} has values that are not finite")
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}
    save_torch_state_dict(state, folder, metadata={"format": "pt"}, max_shard_size="5GB")
    generation = _special_tokens(tokenizer) if generation is None else generation
    config = shape.hf_fields() | {name: generation.get(name) for name in SPECIAL}
    # both spellings: transformers 4 and vLLM read torch_dtype, transformers 5 reads dtype
    config["dtype"] = config["torch_dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    write_generation(folder, generation)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def write_generation(folder: Path, generation: Mapping[str, Any]) -> None:
    """Write the values unchanged: transformers' class refuses to save some values that it reads, such as a temperature
    alone."""
    text = json.dumps({name: value for name, value in generation.items() if value is not None}, indent=2)
    (folder / GENERATION_FILE).write_text(text + "\n")


def _special_tokens(tokenizer: PreTrainedTokenizerBase | None) -> dict[str, int | None]:
    return {name: getattr(tokenizer, name, None) for name in SPECIAL}


def plain_model(shape: Shape, tensors: Mapping[str, Tensor]) -> Model:
    """An unsharded fp32 model on the CPU with the given tensors."""
    with torch.device("meta"):
        model = shape.build()
    model.load_state_dict(dict(tensors), strict=True, assign=True)
    model.reset_buffers(torch.device("cpu"))
    return model


@torch.no_grad()
def verify_export(
    folder: Path,
    shape: Shape,
    *,
    tensors: Mapping[str, Tensor],
    rows: Rows,
    dtype: torch.dtype = torch.float32,
) -> list[list[int]]:
    """Open an export with transformers and compare it with ours: names, weights, and logits of a pass over each row.

    Returns our most probable token after each token of the rows. Raises ModelError for missing or unexpected names, a
    different weight, or logits that differ by more than 1e-4 of their scale.
    """
    from transformers import AutoModelForCausalLM, PreTrainedModel

    options = {"dtype": torch.float32, "output_loading_info": True, **without_map(PreTrainedModel)}
    try:
        told = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False, use_safetensors=True, **options)
    except (OSError, ValueError, SafetensorError) as error:
        open_folder(folder)  # raises for a damaged file, and names it
        raise ModelError(f"the export in {folder} does not load in transformers: {first_line(error)}") from error
    theirs, info = cast("tuple[PreTrainedModel, dict[str, Any]]", told)
    wrong = {key: sorted(map(str, names)) for key, names in info.items() if names}
    if wrong:
        raise ModelError(f"the export in {folder} does not load in transformers: {shortened(wrong, 400)}")
    loaded, written = theirs.state_dict(), {name: tensor.to(dtype).float() for name, tensor in tensors.items()}
    changed = [name for name, tensor in written.items() if not torch.equal(loaded[name], tensor)]
    if changed:
        raise ModelError(f"the export in {folder} holds other weights than were written: {first_few(changed, 5)}")
    ours = plain_model(shape, written)
    expected = [sequence_logits(ours, ids) for ids in rows]
    got = [theirs.eval()(torch.tensor([list(ids)])).logits[0] for ids in rows]
    return check_logits(got, expected, f"the export in {folder}")


def without_map(kind: type[PreTrainedModel]) -> dict[str, Any]:
    """Options that make transformers read the files instead of mapping them, if it can (5.x): a map of a truncated
    file, or of one on a failing disk, ends the process."""
    takes = signature(vars(kind)["from_pretrained"].__func__).parameters
    return {"disable_mmap": True} if "disable_mmap" in takes else {}


# --- comparison ------------------------------------------------------------------------------------------------------


def rows_of(batches: Sequence[Batch]) -> list[list[int]]:
    """The beginnings of the first documents in the first rows of these batches; none if everything is padding."""
    rows = ((ids, docs) for batch in batches for ids, docs in zip(batch.input_ids, batch.doc_ids, strict=True))
    begun = ((ids, docs) for ids, docs in rows if docs[0] >= 0)
    return [ids[docs == docs[0]][:TOKENS].tolist() for ids, docs in islice(begun, ROWS)]


def random_rows(vocab_size: int) -> list[list[int]]:
    """Rows for a model without access to its data; always the same."""
    generator = torch.Generator().manual_seed(0)
    rows: list[list[int]] = torch.randint(vocab_size, (ROWS, TOKENS), generator=generator).tolist()
    return rows


@torch.no_grad()
def sequence_logits(model: Model, ids: Sequence[int]) -> Tensor:
    """The logits after each of the tokens `ids`, [len(ids), V] fp32 on the model's device."""
    device = model.head_weight.device
    input_ids = torch.tensor([list(ids)], dtype=torch.int64, device=device)
    positions = torch.arange(len(ids), device=device).unsqueeze(0)
    logits: Tensor = model(input_ids, positions, torch.zeros_like(input_ids), packed=False, head=logits_head)
    return logits[0]


def check_logits(got: Sequence[Tensor], expected: Sequence[Tensor], what: str) -> list[list[int]]:
    """The most probable token after each token of each row, by the expected logits, [tokens, V] for each row.

    Raises ModelError that names `what` if logits differ by more than 1e-4 of their scale.
    """
    for row, ours in zip(got, expected, strict=True):
        error, limit = (row - ours).abs().max().item(), 1e-4 * max(1.0, ours.abs().max().item())
        if not error <= limit:
            raise ModelError(f"{what} computes other logits: off by {error:.3g}, allowed {limit:.3g}")
    return [ours.argmax(dim=-1).tolist() for ours in expected]
