"""Configs: how an error is rendered, the shipped ones, what is computed from them, dumps."""

from __future__ import annotations

import dataclasses
import string
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.ferry import REPO
from trainer.config.keys import known_keys
from trainer.config.load import (
    ConfigError,
    config_from_dict,
    config_notes,
    config_to_dict,
    config_to_yaml,
    load_config,
    local_data_paths,
    num_processes,
)
from trainer.config.train import length_notes
from trainer.schema import (
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    RunConfig,
    TargetConfig,
    TrainConfig,
)

IMPORT = "from trainer.schema import *\n"


# --- errors -----------------------------------------------------------------------------------------------------------


def test_error_with_place_and_hint_renders_three_lines() -> None:
    error = ConfigError("train.x is not a key", where="a.yaml:14", hint="did you mean train.y?")
    assert error.render() == "Error: train.x is not a key\n  in a.yaml:14\nhint: did you mean train.y?"
    assert error.exit_code == 2


def test_error_without_place_and_hint_renders_one_line() -> None:
    assert ConfigError("no config").render() == "Error: no config"


# --- startup ----------------------------------------------------------------------------------------------------------


def test_import_loads_neither_torch_nor_yaml_nor_deployer() -> None:
    code = (
        "import sys; sys.path.insert(0, ''); from trainer.config.load import load_config;"
        "load_config('configs/02_debug_sft_fsdp.py', ['target.gpu_ranks=0,1', 'optim.learning_rate=1e-4']);"
        "print([m for m in ('torch', 'yaml', 'deployer', 'numpy', 'click') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# --- the shipped configs ----------------------------------------------------------------------------------------------


def test_debug_config_is_one_process_on_a_device_chosen_by_the_host() -> None:
    config = load_config(REPO / "configs/01_debug_sft.py")
    assert (num_processes(config), config.target.device) == (1, "auto")
    assert local_data_paths(config, root=REPO) == []


def test_fsdp_config_names_four_gpus() -> None:
    config = load_config(REPO / "configs/02_debug_sft_fsdp.py")
    assert config.target.gpu_ranks == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["01_debug_sft.py", "02_debug_sft_fsdp.py"])
def test_shipped_config_takes_the_overrides_its_docstring_names(name: str) -> None:
    path = REPO / "configs" / name
    words = ["model.name=Qwen/Qwen2.5-0.5B-Instruct", "data.train=my.jsonl", "optim.learning_rate=1e-5"]
    assert all(word in path.read_text() for word in words)
    config = load_config(path, words)
    assert (config.model.name, config.data.train) == ("Qwen/Qwen2.5-0.5B-Instruct", ["my.jsonl"])
    assert config_notes(config, backend="fsdp", deployed=True) == []


def test_pretraining_config_takes_the_overrides_its_docstring_names() -> None:
    path = REPO / "configs/03_debug_pretrain.py"
    words = ["data.train=corpus.tokens", "data.tokenizer=Qwen/Qwen3-0.6B"]
    assert all(word in path.read_text() for word in words)
    config = load_config(path, words)
    assert (config.recipe, config.data.train) == ("pretrain", ["corpus.tokens"])
    assert config_notes(config, backend="pytorch", deployed=True) == []


# --- helpers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "processes"),
    [
        (Config(), 1),
        (Config(target=TargetConfig(gpu_ranks=[4, 5])), 2),
        (Config(script="a.py", target=TargetConfig(gpu_ranks=[0, 1])), 2),
        (Config(script="a.py", torchrun=False, target=TargetConfig(gpu_ranks=[0, 1])), 1),
    ],
)
def test_number_of_processes_follows_from_gpu_ranks(config: Config, processes: int) -> None:
    assert num_processes(config) == processes


def test_local_paths_are_told_from_hub_names(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    train_data = ["builtin:stdlib-docs", "HuggingFaceH4/no_robots", "a.jsonl", "rows", "./x", "~/y", "a.jsonl"]
    config = Config(
        data=DataConfig(train=train_data, eval=["hf://d/x.parquet", "e.parquet"], chat_template="chat.jinja"),
        model=ModelConfig(name="../m"),
    )
    found = ["a.jsonl", "rows", "./x", "~/y", "e.parquet", "../m", "chat.jinja"]
    assert local_data_paths(config, root=tmp_path) == found


def test_micro_batch_size_beside_a_token_budget_is_noted() -> None:
    train = TrainConfig(micro_batch_tokens=512, global_batch_size=8, micro_batch_size=2)
    config = Config(train=train, data=DataConfig(packing=False))
    [note] = config_notes(config, backend="ddp", deployed=True)
    assert note.startswith("train.micro_batch_size: no effect, train.micro_batch_tokens decides")


def test_keys_without_effect_are_noted() -> None:
    config = Config(
        target=TargetConfig(ssh="gpu", root="/data"),
        model=ModelConfig(name="gpt", num_layers=9),
        data=DataConfig(train=["a.jsonl", "some/rows"], train_split="validation", eval_split="dev", eval=["b.parquet"]),
        parallel=ParallelConfig(reshard_after_forward=False, reduce_dtype="bf16"),
    )
    assert config_notes(config, backend="pytorch", deployed=False) == [
        "model.num_layers: no effect, gpt brings its own shape",
        "data.eval_split: no effect, data.eval names no Hugging Face data set",
        "parallel.reshard_after_forward, parallel.reduce_dtype: no effect with pytorch",
        "target.ssh, target.root: no effect, train.py runs here and under this Python",
    ]
    assert len(config_notes(config, backend="ddp", deployed=True)) == 3
    assert config_notes(Config(), backend="pytorch", deployed=False) == []


# --- dumps ------------------------------------------------------------------------------------------------------------


def test_dump_has_every_key_in_the_schemas_order_with_lists_on_one_line() -> None:
    text = config_to_yaml(Config(target=TargetConfig(gpu_ranks=[0, 1], env={"A": "1"})))
    values = yaml.safe_load(text)
    assert [k for k in values if not isinstance(values[k], dict)] == ["recipe", "files", "script", "args", "torchrun"]
    dumped = {f"{k}.{leaf}" for k, v in values.items() if isinstance(v, dict) for leaf in v}
    assert dumped == {key for key in known_keys() if "." in key}
    assert text.startswith(
        "recipe: sft\ntarget:\n  gpu_ranks: [0, 1]\n  train_backend: auto\n  device: auto\n  ssh: null\n"
    )
    assert "  env:\n    A: '1'\n" in text


def test_dict_with_a_wrong_value_names_where_it_came_from() -> None:
    values = config_to_dict(Config())
    values["train"]["steps"] = "50"
    with pytest.raises(ConfigError) as caught:
        config_from_dict(values, "job.json")
    assert caught.value.render() == "Error: train.steps is '50', expected a whole number or null\n  in job.json"


# Every text that a file can hold: no lone surrogates, no NUL.
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30)
named = texts.filter(lambda text: bool(text.strip()))
names = st.text(string.ascii_letters + "_", min_size=1, max_size=8).map(lambda name: f"X_{name}")
positive = st.floats(1e-12, 1e12)
configs = st.builds(
    Config,
    target=st.builds(
        TargetConfig,
        gpu_ranks=st.lists(st.integers(0, 99), min_size=1, max_size=4, unique=True),
        train_backend=st.sampled_from(["auto", "ddp", "fsdp"]),
        root=named,
        env=st.dictionaries(names, texts, max_size=3),
    ),
    model=st.builds(ModelConfig, name=st.none() | named, rms_norm_eps=positive, tie_embeddings=st.booleans()),
    data=st.builds(DataConfig, train=st.lists(named, min_size=1, max_size=3), system_prompt=st.none() | texts),
    optim=st.builds(OptimConfig, learning_rate=positive, weight_decay=positive),
    train=st.one_of(
        st.builds(TrainConfig, steps=st.integers(10, 10**9), seed=st.integers(0, 2**32 - 1)),
        st.builds(TrainConfig, steps=st.none(), epochs=positive),
    ),
    files=st.lists(named, max_size=2),
)


@settings(max_examples=60)
@given(config=configs)
def test_any_config_survives_its_dump(tmp_path_factory: pytest.TempPathFactory, config: Config) -> None:
    path = tmp_path_factory.getbasetemp() / "dump.yaml"
    path.write_text(config_to_yaml(config), encoding="utf-8", newline="")
    assert load_config(path) == config
    assert config_from_dict(config_to_dict(config)) == config


def test_dump_of_words_that_yaml_would_read_as_something_else_loads_back(tmp_path: Path) -> None:
    words = ["null", "~", "1e-4", "yes", "010", "1:30", "2024-01-01", "[a]", "- a", "a: b", "#x", "é…", " x ", "'"]
    words += ["a\nb", "0\x85", "x\u2028", "a\t"]
    config = Config(data=dataclasses.replace(Config().data, train=words), run=RunConfig(name="1e-4"))
    (tmp_path / "a.yaml").write_text(config_to_yaml(config))
    assert load_config(tmp_path / "a.yaml") == config


@pytest.mark.parametrize(
    ("values", "backend", "note"),
    [
        ({"data": {"eval_fraction": 0.0}, "train": {"eval_every": 7}}, "fsdp", "train.eval_every: no effect, there is"),
        ({"data": {"schema": "messages"}}, "fsdp", "data.schema: no effect, the built-in text has"),
        ({"train": {"debug_distributed": "info"}}, "pytorch", "train.debug_distributed: no effect with one process"),
        ({"run": {"dir": "there"}}, "fsdp", "run.dir: no effect, a deployed job"),
        ({"data": {"eval": ["a.jsonl"], "eval_fraction": 0.5}}, "fsdp", "data.eval_fraction: no effect, data.eval"),
    ],
)
def test_key_without_effect_in_a_setting_is_noted(values: dict[str, object], backend: str, note: str) -> None:
    assert [
        line.startswith(note) for line in config_notes(config_from_dict(values), backend=backend, deployed=True)
    ] == [True]


def test_share_of_the_built_in_text_counts_where_its_held_out_modules_are_evaluated() -> None:
    config = config_from_dict({"data": {"eval": ["builtin:stdlib-docs"], "eval_fraction": 0.5}})
    assert config_notes(config, backend="fsdp", deployed=True) == []


@pytest.mark.parametrize(("key", "value"), [("recipe", "pretrain"), ("run", {"export": False})])
def test_trainers_keys_beside_a_script_are_refused(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"the trainer does not run, but it is configured in: {key}"):
        config_from_dict({"script": "x.py", key: value})


@pytest.mark.parametrize(
    ("values", "note"),
    [
        (
            {"optim": {"warmup_steps": 9}},
            "optim.warmup_steps is 9, more than the run's 5: the learning rate never peaks",
        ),
        ({"optim": {"schedule": "wsd", "warmup_steps": 2, "decay_steps": 4}}, "optim.warmup_steps + decay_steps is 6,"),
        ({"train": {"profile_steps": [1, 6]}}, "a step of train.profile_steps is 6, more than the run's 5: nothing is"),
        ({"train": {"stop_after_steps": 6}}, "train.stop_after_steps is 6, more than the run's 5: it ends before"),
        ({"train": {"stop_after_steps": 5}}, ""),
    ],
)
def test_key_beyond_the_length_that_epochs_give_is_noted(values: dict[str, dict[str, object]], note: str) -> None:
    train = {"steps": None, "epochs": 1.0, **values.get("train", {})}
    notes = length_notes(config_from_dict({"optim": {"warmup_steps": 0}, **values, "train": train}), 5)
    assert [line.startswith(note) for line in notes] == ([True] if note else [])
