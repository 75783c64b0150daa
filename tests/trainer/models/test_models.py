"""The decoder and Hugging Face's files, compared with transformers."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM

from tests.oracles.reference import SHAPES, from_folder, hf_model, save_hf
from tests.support.tiny import ALONE, export_model, packed_batch, tiny_decoder, tiny_shape
from trainer.batch import Batch
from trainer.errors import ModelError
from trainer.export.model import (
    check_logits,
    plain_model,
    random_rows,
    rows_of,
    sequence_logits,
    verify_export,
    write_export,
)
from trainer.models.families.decoder import Decoder
from trainer.models.families.decoder_shape import DecoderShape, model_folder, shape_from_config, shape_to_hf_config
from trainer.models.hf import gather_full, load_pretrained
from trainer.models.layers import logits_head
from trainer.schema import ModelConfig


@pytest.fixture(params=SHAPES.values(), ids=SHAPES.keys())
def shape(request: pytest.FixtureRequest) -> DecoderShape:
    return request.param


def all_logits(decoder: Decoder, batch: Batch, **options: object) -> torch.Tensor:
    with torch.no_grad():
        return decoder(batch.input_ids, batch.positions, batch.doc_ids, head=logits_head, **options)


# --- the function -----------------------------------------------------------------------------------------------------


def test_parameter_names_are_those_of_transformers(shape):
    theirs = {name: tuple(x.shape) for name, x in hf_model(shape).named_parameters()}
    assert {name: tuple(x.shape) for name, x in Decoder(shape).named_parameters()} == theirs


@pytest.mark.parametrize("changed", [{"rope_theta": 50.0}, {"rms_norm_eps": 0.1}])
def test_fields_of_a_fresh_model_decide_its_logits_as_in_transformers(changed, tmp_path):
    plain, shape = (shape_from_config(ModelConfig(num_layers=1, **fields), 101) for fields in ({}, changed))
    theirs = save_hf(shape, tmp_path)
    ids = list(range(20))
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(sequence_logits(from_folder(tmp_path, shape), ids), expected, atol=1e-4, rtol=0)
    assert (sequence_logits(from_folder(tmp_path, plain), ids) - expected).abs().max() > 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kernel", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], ids=["plain", "flash"])
def test_one_documents_tokens_never_reach_another(kernel, dtype):
    decoder = tiny_decoder()
    decoder.compute_dtype = dtype
    batch = packed_batch([[6, 10, 5]], length=24)
    other = batch.input_ids.clone()
    other[0, 6:16] = (other[0, 6:16] + 1) % 101
    with sdpa_kernel(kernel):
        before, after = all_logits(decoder, batch)[0], all_logits(decoder, replace(batch, input_ids=other))[0]
    assert torch.equal(before[:6], after[:6])
    assert torch.equal(before[16:21], after[16:21])
    assert not torch.equal(before[6:16], after[6:16])


def test_rows_of_one_document_need_no_mask():
    decoder = tiny_decoder()
    batch = packed_batch([[12], [7]], length=12)
    masked, causal = all_logits(decoder, batch), all_logits(decoder, batch, packed=False)
    torch.testing.assert_close(masked[batch.doc_ids >= 0], causal[batch.doc_ids >= 0], atol=1e-5, rtol=0)


def test_a_row_of_padding_alone_is_finite():
    batch = packed_batch([[4], []], length=8)
    assert all_logits(tiny_decoder(), batch).isfinite().all()


def test_greedy_tokens_equal_transformers_generate(tmp_path):
    shape = SHAPES["llama-untied"]
    theirs = save_hf(shape, tmp_path)
    prompt = [3, 14, 15, 92]
    with torch.no_grad():
        tokens = theirs.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=20, pad_token_id=0)[0].tolist()
    assert sequence_logits(from_folder(tmp_path, shape), tokens)[3:-1].argmax(dim=-1).tolist() == tokens[4:]


def test_rotary_buffer_is_rebuilt_after_to_empty():
    shape = SHAPES["llama-llama3-rope"]
    with torch.device("meta"):
        decoder = Decoder(shape)
    decoder.to_empty(device="cpu")
    decoder.reset_buffers(torch.device("cpu"))
    assert torch.equal(decoder.model.inv_freq, Decoder(shape).model.inv_freq)
    assert decoder.model.inv_freq.dtype == torch.float32


def test_num_params_counts_a_tied_matrix_once():
    tied, untied = tiny_shape().num_params, tiny_shape(tie_embeddings=False).num_params
    assert untied - tied == 101 * 32
    assert tied == sum(parameter.numel() for parameter in hf_model(tiny_shape()).parameters())


# --- reading ----------------------------------------------------------------------------------------------------------


def test_shape_of_a_saved_config_is_the_shape_it_was_made_from(shape, tmp_path):
    shape_to_hf_config(shape).save_pretrained(tmp_path)
    assert shape_from_config(ModelConfig(name=str(tmp_path)), 101) == shape


def test_shape_from_fields_divides_the_hidden_size_among_the_heads():
    shape = shape_from_config(ModelConfig(hidden_size=64, num_heads=4), 300)
    assert (shape.head_dim, shape.vocab_size, shape.family) == (16, 300, "qwen3")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "gpt_neox"}, "model_type=gpt_neox"),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, "use_sliding_window=True"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ({"rope_parameters": None, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type=dynamic"),
        ({"vocab_size": 50}, "vocab_size=50"),
    ],
)
def test_an_unsupported_config_is_refused_by_field(change, named, tmp_path):
    shape_to_hf_config(SHAPES["qwen2-tied"]).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelError, match=named):
        shape_from_config(ModelConfig(name=str(tmp_path)), 101)


def test_heads_that_do_not_divide_are_refused_with_the_numbers():
    with pytest.raises(ModelError, match=r"hidden_size=100 is not a multiple of model.num_heads=3"):
        shape_from_config(ModelConfig(hidden_size=100, num_heads=3, num_kv_heads=1), 300)


def test_a_sharded_checkpoint_in_bf16_loads_as_fp32(tmp_path):
    shape = SHAPES["qwen2-untied-mha"]
    hf_model(shape).bfloat16().save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    decoder = from_folder(tmp_path, shape)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    assert all(torch.equal(x, expected[name]) and x.dtype == torch.float32 for name, x in decoder.named_parameters())


def test_missing_and_unexpected_weights_are_both_named(tmp_path):
    save_hf(tiny_shape(), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.extra.weight"] = tensors.pop("model.norm.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"Missing: model\.norm\.weight\. Unexpected: model\.extra\.weight"):
        from_folder(tmp_path, tiny_shape())


def test_a_folder_without_weights_is_refused(tmp_path):
    shape_to_hf_config(tiny_shape()).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"has no weights: .* found config\.json; set model\.init=random"):
        from_folder(tmp_path, tiny_shape())


def test_a_tensor_of_another_shape_is_refused(tmp_path):
    save_hf(tiny_shape(), tmp_path)
    with pytest.raises(ModelError, match=r"q_proj\.weight has shape \[32, 32\], the model needs \[64, 32\]"):
        from_folder(tmp_path, tiny_shape(head_dim=16, num_kv_heads=1))


def test_a_tied_model_with_another_head_is_refused_as_transformers_unties_it(tmp_path):
    decoder = tiny_decoder()
    write_export(tmp_path, decoder.shape, tensors=decoder.state_dict(), tokenizer=None)
    weights = load_file(tmp_path / "model.safetensors")
    for noise in (0.0, 1.0):
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + noise
        save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
        if theirs.lm_head.weight is theirs.model.embed_tokens.weight:
            load_pretrained(tiny_decoder(seed=1), tmp_path)
        else:
            with pytest.raises(ModelError, match=r"lm_head\.weight differs"):
                load_pretrained(tiny_decoder(seed=1), tmp_path)


def test_a_stored_value_that_is_not_finite_is_refused(tmp_path):
    decoder = tiny_decoder()
    write_export(tmp_path, decoder.shape, tensors=decoder.state_dict(), tokenizer=None)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.norm\.weight has values that are not finite"):
        load_pretrained(tiny_decoder(), tmp_path)


def test_a_truncated_weights_file_is_refused(tmp_path):
    save_hf(tiny_shape(), tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ModelError, match="cannot be read as safetensors"):
        from_folder(tmp_path, tiny_shape())


def test_a_missing_model_folder_is_named(tmp_path):
    with pytest.raises(ModelError, match="there is no such folder"):
        model_folder(str(tmp_path / "nothing"), ALONE)


def test_a_hub_name_without_a_network_is_one_clear_error(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"model\.name=nobody/nothing is no folder here and could not be fetched"):
        model_folder("nobody/nothing", ALONE)


def test_random_weights_depend_on_the_seed_alone():
    first, again, other = (tiny_decoder(seed=seed).model.embed_tokens.weight for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.std().item() == pytest.approx(0.02, rel=0.05)


# --- writing ----------------------------------------------------------------------------------------------------------


def test_an_export_predicts_what_transformers_does_and_leaves_no_other_folder(shape, tmp_path):
    decoder, rows = tiny_decoder(**shape.__dict__), random_rows(shape.vocab_size)
    predicted = export_model(tmp_path / "out", decoder, shape=shape, rows=rows, dist=ALONE)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    with torch.no_grad():
        assert predicted == theirs(torch.tensor(rows)).logits.argmax(dim=-1).tolist()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_rows_to_compare_are_beginnings_of_documents_and_no_padding():
    batch = packed_batch([[3, 4], [], [100], [2]], length=128)
    first, second = rows_of([batch])
    assert first == batch.input_ids[0, :3].tolist()
    assert second == batch.input_ids[2, :64].tolist()
    assert rows_of([packed_batch([[]], length=8)]) == []


def test_logits_further_apart_than_their_scale_allows_are_refused():
    ours = torch.tensor([[1.0, 30.0, 2.0], [4.0, 0.0, 1.0]])
    assert check_logits([ours + 0.002], [ours], "it") == [[1, 0]]
    with pytest.raises(ModelError, match=r"^it computes other logits: off by 0\.004, allowed 0\.003"):
        check_logits([ours, ours + 0.004], [ours, ours], "it")


def test_an_export_has_a_head_only_when_untied(tmp_path):
    for tied in (True, False):
        folder = tmp_path / str(tied)
        decoder = tiny_decoder(tie_embeddings=tied)
        write_export(folder, decoder.shape, tensors=gather_full(decoder, ALONE), tokenizer=None)
        assert ("lm_head.weight" in load_file(folder / "model.safetensors")) is not tied


def test_an_export_config_says_rope_and_dtype_in_both_spellings(tmp_path):
    shape = SHAPES["llama-llama3-rope"]
    tensors = gather_full(tiny_decoder(**shape.__dict__), ALONE)
    write_export(tmp_path, shape, tensors=tensors, tokenizer=None, dtype=torch.bfloat16)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["rope_theta"] == 5e5
    assert config["rope_scaling"]["rope_type"] == "llama3"
    assert config["torch_dtype"] == config["dtype"] == "bfloat16"
    assert load_file(tmp_path / "model.safetensors")["model.norm.weight"].dtype == torch.bfloat16
    verify_export(tmp_path, shape, tensors=tensors, rows=[[1]], dtype=torch.bfloat16)


def test_a_tensor_that_is_not_finite_is_not_exported(tmp_path):
    tensors = gather_full(tiny_decoder(), ALONE)
    tensors["model.norm.weight"][3] = float("nan")
    with pytest.raises(ModelError, match=r"not exported: model\.norm\.weight"):
        write_export(tmp_path / "out", tiny_shape(), tensors=tensors, tokenizer=None)
    assert not (tmp_path / "out").exists()


def test_an_export_with_another_function_does_not_verify(tmp_path):
    decoder = tiny_decoder()
    for parameter in decoder.parameters():
        parameter.data.normal_(std=0.3)
    tensors = gather_full(decoder, ALONE)
    write_export(tmp_path, replace(decoder.shape, rope_theta=100.0), tensors=tensors, tokenizer=None)
    with pytest.raises(ModelError, match="computes other logits"):
        verify_export(tmp_path, decoder.shape, tensors=tensors, rows=[[1, 2]])


def test_an_export_with_another_weight_does_not_verify(tmp_path):
    tensors = gather_full(tiny_decoder(), ALONE)
    write_export(tmp_path, tiny_shape(), tensors=tensors, tokenizer=None)
    tensors["model.norm.weight"][0] = 2.0
    with pytest.raises(ModelError, match=r"other weights than were written: model\.norm\.weight"):
        verify_export(tmp_path, tiny_shape(), tensors=tensors, rows=[[1]])


def test_gathered_weights_build_a_plain_model_with_the_same_logits():
    decoder = tiny_decoder()
    again = plain_model(decoder.shape, gather_full(decoder, ALONE))
    assert torch.equal(sequence_logits(again, [1, 2, 3]), sequence_logits(decoder, [1, 2, 3]))
