"""Folders as others lay them out: what transformers opens is opened as the same model, all else is told in a line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.support.tiny import tiny_decoder, tiny_shape
from trainer.errors import ModelError
from trainer.export.model import sequence_logits
from trainer.models.families.decoder import Decoder
from trainer.models.families.decoder_shape import DecoderShape, shape_from_pretrained
from trainer.models.hf import load_pretrained
from trainer.words import first_few

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
Tensors = dict[str, Tensor]
IDS = [5, 17, 3, 99, 42]


def weights_of(shape: DecoderShape) -> Tensors:
    """As transformers writes them, a tied head left out."""
    model = tiny_decoder(**{name: getattr(shape, name) for name in DecoderShape.__dataclass_fields__})
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


def write(folder: Path, shape: DecoderShape, tensors: Tensors) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**shape.hf_fields(), "architectures": [shape.hf_class]}))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def split(folder: Path, tensors: Tensors) -> None:
    """Two shards, the first of fewer tensors, and their index."""
    names, map_ = sorted(tensors), {}
    for number, part in enumerate((names[:3], names[3:]), start=1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        map_ |= dict.fromkeys(part, file)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": map_}))


def ours(folder: Path) -> Tensor:
    model = Decoder(shape_from_pretrained(folder, 101))
    load_pretrained(model, folder)
    return sequence_logits(model.eval(), IDS)


def theirs(folder: Path) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model.eval()(torch.tensor([IDS])).logits[0]


def as_they_are(tensors: Tensors) -> Tensors:
    return tensors


def without_prefix(tensors: Tensors) -> Tensors:
    """As a model without its head is saved."""
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


def head_for_embedding(tensors: Tensors) -> Tensors:
    return {HEAD if name == EMBEDDING else name: tensor for name, tensor in tensors.items()}


def head_beside_embedding(tensors: Tensors) -> Tensors:
    return {**tensors, HEAD: tensors[EMBEDDING].clone()}


def old_buffers(tensors: Tensors) -> Tensors:
    return {**tensors, **{f"model.layers.{n}.self_attn.rotary_emb.inv_freq": torch.ones(4) for n in range(2)}}


def mixed_types(tensors: Tensors) -> Tensors:
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    return {name: tensor.to(kinds[number % 3]) for number, (name, tensor) in enumerate(tensors.items())}


LAYOUTS = (as_they_are, without_prefix, head_for_embedding, head_beside_embedding, old_buffers, mixed_types)


@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "sharded"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_layout_is_opened_as_the_model_that_transformers_makes_of_it(
    tmp_path: Path, layout: Callable[[Tensors], Tensors], sharded: bool
) -> None:
    for number, shape in enumerate((tiny_shape(family="qwen3"), tiny_shape(family="llama", tie_embeddings=False))):
        if not shape.tie_embeddings and layout in (without_prefix, head_for_embedding, head_beside_embedding):
            continue  # a head of its own has to be there, under its own name
        tensors = layout(weights_of(shape))
        folder = write(tmp_path / str(number), shape, tensors)
        if sharded:
            split(folder, tensors)
        torch.testing.assert_close(ours(folder), theirs(folder), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "base_model.model."])
def test_wrapper_of_the_model_that_was_saved_is_seen_through(tmp_path: Path, prefix: str) -> None:
    shape = tiny_shape()
    plain = ours(write(tmp_path / "plain", shape, weights_of(shape)))
    wrapped = {prefix + name: tensor for name, tensor in weights_of(shape).items()}
    assert torch.equal(ours(write(tmp_path / "wrapped", shape, wrapped)), plain)
    inner = {n.replace(".self_attn.", "._orig_mod.self_attn."): t for n, t in weights_of(shape).items()}
    assert torch.equal(ours(write(tmp_path / "blocks", shape, inner)), plain)


def test_tensor_under_two_names_is_refused(tmp_path: Path) -> None:
    shape = tiny_shape()
    tensors = {**weights_of(shape), "module.model.norm.weight": torch.zeros(32)}
    with pytest.raises(ModelError, match=r"model.norm.weight is stored twice, as m\S+ and as m"):
        ours(write(tmp_path / "m", shape, tensors))


def test_untied_model_without_a_head_is_refused(tmp_path: Path) -> None:
    shape = tiny_shape(tie_embeddings=False)
    tensors = {name: tensor for name, tensor in weights_of(shape).items() if name != HEAD}
    with pytest.raises(ModelError, match=r"Missing: lm_head.weight. Unexpected: none."):
        ours(write(tmp_path / "m", shape, tensors))


def test_strange_names_of_a_deep_model_are_told_in_a_line_that_is_cut(tmp_path: Path) -> None:
    shape = tiny_shape(num_layers=32)
    tensors = {f"transformer.h.{number}.w": torch.zeros(1) for number in range(400)}
    with pytest.raises(ModelError) as caught:
        ours(write(tmp_path / "m", shape, tensors))
    told = str(caught.value)
    assert "and 349 more. Unexpected: transformer.h.0.w" in told and "and 395 more." in told
    assert len(told) < 900 and "\n" not in told


def test_single_file_comes_before_an_index_as_in_transformers(tmp_path: Path) -> None:
    shape = tiny_shape()
    folder = write(tmp_path / "m", shape, weights_of(shape))
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    torch.testing.assert_close(ours(folder), theirs(folder), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("pytorch_model.bin", "a .bin file is a pickle"), ("adapter_config.json", "name its base as model.name")],
)
def test_folder_with_other_weights_says_what_to_do(tmp_path: Path, name: str, hint: str) -> None:
    shape = tiny_shape()
    folder = write(tmp_path / "m", shape, weights_of(shape))
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(ModelError) as caught:
        ours(folder)
    assert caught.value.hint.startswith(hint) or hint in caught.value.hint


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", "a/../../b", "x\0y"])
def test_index_may_name_no_file_elsewhere(tmp_path: Path, name: str) -> None:
    shape = tiny_shape()
    folder = write(tmp_path / "m", shape, weights_of(shape))
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {EMBEDDING: name}}))
    with pytest.raises(ModelError, match="which is not in the folder"):
        ours(folder)


def test_long_lists_are_cut_with_a_count() -> None:
    assert first_few(["a", "b"], 3) == "a, b"
    assert first_few([str(number) for number in range(1005)], 2) == "0, 1 and 1,003 more"
    assert len(first_few(["x" * 5000], 1)) == 200
