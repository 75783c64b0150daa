"""`train.py export`: any complete checkpoint becomes what transformers and torch load, or one error says why not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file

from tests.support.ranks import run_ranks
from trainer.commands import cli
from trainer.commands.export import export
from trainer.config.load import config_from_dict, config_to_dict
from trainer.dist import Dist
from trainer.errors import ModelError, UserError
from trainer.export.checkpoint import check_space
from trainer.recipes import sft

MODEL = {"hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}


def train(dist: Dist, run_dir: str, values: dict[str, Any]) -> None:
    assert sft.run(config_from_dict(values), Path(run_dir), dist) == 0


def make_run(folder: Path, world_size: int, **sections: dict[str, Any]) -> Path:
    """A run folder with checkpoints of steps 1 and 2 and the export that the run itself made at its end."""
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"question": f"{n}?", "answer": "na " * n}) + "\n" for n in range(1, 13)))
    values: dict[str, Any] = {
        "target": {"device": "cpu", "gpu_ranks": list(range(world_size))},
        "model": MODEL,
        "data": {"train": [str(rows)], "seq_len": 48, "eval_fraction": 0},
        "train": {"steps": 2, "micro_batch_size": 2, "save_every": 1},
        "optim": {"learning_rate": 1e-2, "warmup_steps": 0},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    (folder / "run").mkdir()
    run_ranks(train, world_size, str(folder / "run"), values)
    return folder / "run"


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied qwen3 run of two FSDP ranks; the vocabulary of 260 and 32 columns divide, 2 key-value heads too."""
    return make_run(tmp_path_factory.mktemp("fsdp"), 2, target={"train_backend": "fsdp"})


def call(*args: object) -> Result:
    return CliRunner().invoke(export, [str(arg) for arg in args], catch_exceptions=True)


def exported(*args: object) -> dict[str, Any]:
    result = call(*args, "--json")
    assert result.exit_code == 0, (result.output, result.exception)
    return json.loads(result.stdout)


def fresh_keys(folder: Path) -> set[str]:
    """The names that transformers itself would save for a new model of this config."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    return set(model.state_dict()) - tied


@pytest.mark.parametrize(
    ("world_size", "backend", "model"),
    [
        (2, "fsdp", {"family": "llama", "tie_embeddings": False}),
        (2, "ddp", {"family": "qwen2"}),
        (1, "fsdp", {"family": "qwen3", "num_kv_heads": 1}),
    ],
)
def test_any_checkpoint_of_any_backend_is_the_model_that_the_run_exported(tmp_path, world_size, backend, model):
    run = make_run(tmp_path, world_size, target={"train_backend": backend}, model=model)
    folder = Path(exported(run)["export"])
    assert folder == run / "export_step_000002"
    ours, at_the_end = load_file(folder / "model.safetensors"), load_file(run / "export" / "model.safetensors")
    assert set(ours) == fresh_keys(folder)
    assert all(torch.equal(ours[name], at_the_end[name]) for name in at_the_end)


def test_earlier_checkpoint_gives_fresh_models_names_and_the_logits_of_its_weights(sharded, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = Path(exported(sharded, "--step", 1, "--out", tmp_path / "one")["export"])
    assert set(load_file(folder / "model.safetensors")) == fresh_keys(folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    state = Path(exported(sharded, "--step", "1", "--full-state", tmp_path / "one.pt")["full_state"])
    same = AutoModelForCausalLM.from_config(theirs.config)
    same.load_state_dict({**torch.load(state, weights_only=True)["model"], "lm_head.weight": theirs.lm_head.weight})
    ids = AutoTokenizer.from_pretrained(folder)("hello", return_tensors="pt")["input_ids"]
    torch.testing.assert_close(theirs.eval()(ids).logits, same.eval()(ids).logits, atol=1e-5, rtol=1e-5)
    assert (folder / "generation_config.json").exists()
    assert "im_start" in (folder / "chat_template.jinja").read_text()


def test_bf16_export_is_half_the_size_and_says_so(sharded, tmp_path):
    folder = Path(exported(sharded, "--dtype", "bf16", "--out", tmp_path / "half")["export"])
    assert {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"


def test_full_state_has_whole_tensors_and_optimizer_for_plain_torch(sharded, tmp_path):
    state = torch.load(exported(sharded, "--full-state", tmp_path / "all.pt")["full_state"], weights_only=True)
    weights = load_file(sharded / "export" / "model.safetensors")
    assert sorted(state) == ["config", "model", "optimizer", "step"]
    assert (state["step"], set(state["optimizer"])) == (2, set(weights))
    assert all(torch.equal(state["model"][name], tensor) for name, tensor in weights.items())
    moment = state["optimizer"]["model.embed_tokens.weight"]["exp_avg"]
    assert moment.shape == weights["model.embed_tokens.weight"].shape
    assert state["config"] == json.loads(json.dumps(config_to_dict(config_from_dict(state["config"]))))
    assert not (sharded / "export_all").exists()


def test_lora_run_gives_the_adapter_that_it_exported_and_the_merged_model_when_asked(tmp_path):
    run = make_run(tmp_path, 1, lora={"rank": 2})
    folder = Path(exported(run, "--merge")["export"])
    name = "adapter/adapter_model.safetensors"
    ours, at_the_end = load_file(folder / name), load_file(run / "export" / name)
    assert set(ours) == set(at_the_end)
    assert all(torch.equal(ours[key], at_the_end[key]) for key in at_the_end)
    assert set(load_file(folder / "model.safetensors")) == fresh_keys(folder)


def test_adapter_over_weights_that_have_changed_is_refused(tmp_path, sharded):
    base = tmp_path / "base"
    shutil.copytree(sharded / "export", base)
    run = make_run(tmp_path, 1, lora={"rank": 2}, model={"name": str(base)})
    (base / "model.safetensors").write_bytes((exported_step_1(sharded, tmp_path) / "model.safetensors").read_bytes())
    assert "was trained over other weights: sha256 " in refusal(run, "--merge").message


def exported_step_1(run: Path, folder: Path) -> Path:
    return Path(exported(run, "--step", 1, "--out", folder / "first")["export"])


def test_merging_a_run_without_adapters_is_refused(sharded, tmp_path):
    assert refusal(sharded, "--merge", "--out", tmp_path / "x").message.endswith("has no adapters to merge")


def test_checkpoint_itself_names_its_run(sharded, tmp_path):
    result = exported(sharded / "checkpoints" / "step_000001", "--out", tmp_path / "x")
    assert (result["step"], result["dtype"]) == (1, "fp32")


# --- what cannot be exported ------------------------------------------------------------------------------------------


def refusal(*args: object) -> UserError:
    error = call(*args).exception
    assert isinstance(error, ModelError), error
    return error


def test_folder_that_is_no_run_is_named(tmp_path):
    assert refusal(tmp_path / "none").message == f"there is no run folder {tmp_path}/none"
    assert refusal(tmp_path).message == f"{tmp_path} holds no complete checkpoint"


def test_step_that_was_not_saved_lists_those_that_were(sharded):
    error = refusal(sharded, "--step", "7")
    assert (error.message, error.hint) == (f"{sharded} has no complete checkpoint of step 7", "it has: 1, 2")


@pytest.fixture
def damaged(sharded, tmp_path) -> Path:
    run = tmp_path / "run"
    shutil.copytree(sharded, run)
    shard = next((run / "checkpoints" / "step_000002").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:100])
    return run


@pytest.mark.parametrize("options", [[], ["--full-state", "all.pt"]])
def test_damaged_checkpoint_is_named_with_the_others(damaged, options, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    error = refusal(damaged, *options)
    assert f"cannot load {damaged}/checkpoints/step_000002" in error.message
    assert error.hint == "others are there: --step 1"
    assert not (damaged / "export_step_000002").exists()
    assert not (tmp_path / "all.pt").exists()


def test_folder_that_is_no_model_is_not_replaced(sharded, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    error = refusal(sharded, "--out", tmp_path)
    assert error.message == f"{tmp_path} is there already and is no model"
    assert (tmp_path / "notes.txt").exists()


def test_disk_without_room_is_told_with_both_sizes(tmp_path):
    with pytest.raises(ModelError) as caught:
        check_space(tmp_path / "x", 2**60)
    assert caught.value.message.startswith(f"no room for {tmp_path}/x: it needs 1073741824.06 GiB and ")


def test_mistake_is_one_paragraph_and_exit_code_2(tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["export", str(tmp_path)])
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith(f"Error: {tmp_path} holds no complete checkpoint\nhint: a run saves ")
