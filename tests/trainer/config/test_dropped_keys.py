"""Keys that the schema has no longer, FSDP1's words among them: silent at their default, answered at another value."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy, StateDictType

from trainer.config.accelerate import RULES
from trainer.config.dropped import Dropped, Refused, take_out
from trainer.config.files import parse_yaml
from trainer.config.fsdp1 import ACCELERATE_NAMES, DROPPED_WORDS, STRATEGIES
from trainer.config.keys import DROPPED, get_key, known_keys
from trainer.config.load import (
    ConfigError,
    Draft,
    config_from_dict,
    config_to_dict,
    config_to_yaml,
    load_config,
)
from trainer.schema import Config, TrainConfig

OLD = Path(__file__).parents[2] / "compat" / "jobs" / "sft"
ANSWERS = [
    ("parallel.backward_prefetch", "null", "silent"),
    ("parallel.backward_prefetch", "BACKWARD_PRE", "no effect, it is built in: the backward gathers one group ahead"),
    ("parallel.backward_prefetch", "BACKWARD_POST", "parallel.backward_prefetch is BACKWARD_POST: FSDP2 has none"),
    ("parallel.backward_prefetch", "NO_PREFETCH", "parallel.backward_prefetch is NO_PREFETCH: FSDP2 gathers one group"),
    ("parallel.backward_prefetch", "NONE", "parallel.backward_prefetch is NONE: FSDP2 gathers one group ahead always"),
    ("parallel.limit_all_gathers", "null", "silent"),
    ("parallel.limit_all_gathers", "true", "no effect, it is built in: FSDP2 frees memory in a fixed order"),
    ("parallel.limit_all_gathers", "false", "parallel.limit_all_gathers is false: FSDP2 frees memory in a fixed order"),
    ("parallel.use_orig_params", "null", "silent"),
    ("parallel.use_orig_params", "true", "no effect, FSDP2 has no flat parameter and the mathematics is the same"),
    ("parallel.use_orig_params", "false", "no effect, FSDP2 has no flat parameter and the mathematics is the same"),
    ("parallel.buffer_dtype", "fp32", "silent"),
    ("parallel.buffer_dtype", "bf16", "parallel.buffer_dtype is bf16: the rotary frequencies stay fp32"),
    ("parallel.buffer_dtype", "fp16", "parallel.buffer_dtype is fp16: the rotary frequencies stay fp32"),
    ("parallel.state_dict_type", "SHARDED_STATE_DICT", "silent"),
    ("parallel.state_dict_type", "FULL_STATE_DICT", "no effect on checkpoints, which are sharded always: the export"),
    ("parallel.state_dict_type", "LOCAL_STATE_DICT", "parallel.state_dict_type is LOCAL_STATE_DICT: it loads at one"),
    ("train.nonfinite", "skip", "silent"),
    ("train.nonfinite", "abort", "is abort, which is train.max_nonfinite_steps=1 now"),
]
"""Of each key each value: nothing, the begin of a line about it, or of an error."""


def config_from_yaml(text: str, file: str, overrides: list[str] | tuple[str, ...] = (), **ways: Any) -> Config:
    draft = Draft.of_tree(*parse_yaml(text.encode(), file))
    draft.override(overrides)
    return draft.finish(**ways)


def outcome(text: str, overrides: list[str] | None = None, **ways: Any) -> str:
    """What is said of a config's one dropped key: a line without its name, an error, or `silent`."""
    notes: list[str] = []
    try:
        config_from_yaml(text, "sft.yaml", overrides or (), tell=notes.append)
    except ConfigError as error:
        assert error.hint and error.where
        return error.message
    (note,) = notes or ["silent"]
    return note


def in_yaml(key: str, value: str) -> str:
    section, name = key.split(".")
    return f"{section}: {{{name}: {value}}}\n"


def says(found: str, key: str, expected: str) -> bool:
    line = f"{key}: {expected}" if expected.startswith("no effect") else f"{key} {expected}"
    return found.startswith(expected if expected == "silent" or expected.startswith(key) else line)


@pytest.mark.parametrize(("key", "value", "expected"), ANSWERS)
def test_each_value_of_a_dropped_key_is_passed_over_told_or_refused(key, value, expected):
    from_yaml = outcome(in_yaml(key, value))
    assert says(from_yaml, key, expected)
    assert outcome("recipe: sft\n", [f"{key}={value}"]) == from_yaml


def values_of(kind: Any) -> set[str]:
    if kind is bool:
        return {"true", "false"}
    if isinstance(kind, str):
        return {kind}
    return {"null"} if kind is type(None) else {value for member in get_args(kind) for value in values_of(member)}


def test_each_value_of_each_dropped_key_stands_above():
    every = {(key, value) for key, dropped in DROPPED.items() for value in values_of(dropped.kind)}
    assert {(key, value) for key, value, _ in ANSWERS} == every


def test_each_value_of_torch_s_own_words_is_answered():
    said = {(key, value) for key, value, _ in ANSWERS}
    assert {("parallel.backward_prefetch", word.name) for word in BackwardPrefetch} <= said
    assert {("parallel.state_dict_type", word.name) for word in StateDictType} <= said
    assert {name: number for number, name in enumerate(STRATEGIES, 1)} == {s.name: s.value for s in ShardingStrategy}


def from_accelerate(folder: Path, name: str, value: str) -> str:
    """What is said of a config with a file of accelerate that gives this one word."""
    (folder / "sft.yaml").write_text("recipe: sft\n")
    (folder / "a.yaml").write_text(f"fsdp_config:\n  {name}: {value}\n")
    notes: list[str] = []
    try:
        load_config(folder / "sft.yaml", fsdp_config=folder / "a.yaml", tell=notes.append)
    except ConfigError as error:
        assert error.where == f"{folder / 'a.yaml'}:2"
        return error.message
    (note,) = notes or ["silent"]
    return note


@pytest.mark.parametrize(("name", "key"), ACCELERATE_NAMES.items())
def test_accelerate_s_spelling_of_a_word_is_answered_like_the_key(name, key, tmp_path):
    values = [value for other, value, _ in ANSWERS if other == key and value != "null"]
    assert len(values) >= 2
    for value in values:
        assert from_accelerate(tmp_path, name, value) == outcome(in_yaml(key, value))
        assert from_accelerate(tmp_path, name, value.lower()) == outcome(in_yaml(key, value.lower()))


def test_dropped_keys_are_no_fields_and_accelerate_s_names_are_its_own():
    assert set(DROPPED) & set(known_keys()) == set()
    assert set(ACCELERATE_NAMES) <= set(RULES)
    assert set(ACCELERATE_NAMES.values()) | {"parallel.buffer_dtype"} == set(DROPPED_WORDS)


def test_the_table_has_each_strategy_of_the_schema():
    choices, _ = get_args(known_keys()["parallel.sharding_strategy"])
    assert list(STRATEGIES) == list(get_args(choices))


def test_value_of_a_wrong_type_is_an_error_with_its_line():
    with pytest.raises(ConfigError) as caught:
        config_from_yaml("parallel:\n  limit_all_gathers: maybe\n", "sft.yaml")
    assert caught.value.message == "parallel.limit_all_gathers is 'maybe', expected true or false or null"
    assert caught.value.where == "sft.yaml:2"


def test_last_value_given_counts():
    text = "parallel: {state_dict_type: LOCAL_STATE_DICT}\ntrain: {nonfinite: abort}\n"
    overrides = ["parallel.state_dict_type=SHARDED_STATE_DICT", "train.nonfinite=skip"]
    notes: list[str] = []
    config = config_from_yaml(text, "sft.yaml", overrides, tell=notes.append)
    assert (config, notes) == (Config(), [])


def test_full_state_needs_the_export_wherever_that_is_turned_off():
    text = "parallel:\n  state_dict_type: FULL_STATE_DICT\n"
    for given, overrides, where in (
        (f"{text}run: {{export: false}}\n", [], "sft.yaml:2"),
        (text, ["run.export=false"], "the command line"),
    ):
        with pytest.raises(ConfigError) as caught:
            config_from_yaml(given, "sft.yaml", overrides)
        message = "parallel.state_dict_type is FULL_STATE_DICT, all weights in one piece, but run.export is false"
        assert (caught.value.message, caught.value.where) == (message, where)
        assert caught.value.hint.startswith("set run.export=true, which writes them, or drop state_dict_type")
    notes: list[str] = []
    config_from_yaml(text, "sft.yaml", tell=notes.append)
    assert "`torchferry export RUN --full-state FILE` writes weights and optimizer in one piece" in notes[0]


def test_value_that_a_line_of_the_table_does_not_name_is_refused():
    was = Dropped(int, 5)
    assert was.answer(5) is None
    assert was.answer(7) == Refused("nothing does that any more", "drop it")


def test_keys_are_taken_out_of_sections_and_of_the_top_level():
    tree = {"train": {"steps": 3, "gone": 1}, "old": 2, "run": None}
    kept, taken = take_out(tree, ["train.gone", "old", "run.gone", "data.gone"])
    assert (kept, taken) == ({"train": {"steps": 3}, "run": None}, {"train.gone": 1, "old": 2})
    assert tree["train"] == {"steps": 3, "gone": 1}


# --- train.nonfinite --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "overrides", "limit"),
    [
        ("train: {nonfinite: abort, max_nonfinite_steps: 3}", [], 3),
        ("{}", ["train.nonfinite=abort", "train.max_nonfinite_steps=4"], 4),
    ],
)
def test_nonfinite_abort_beside_another_limit_in_one_place_is_refused(text, overrides, limit):
    words = f"which is train.max_nonfinite_steps=1 now, and train.max_nonfinite_steps is {limit}"
    with pytest.raises(ConfigError, match=words):
        config_from_yaml(text, "a.yaml", overrides)


@pytest.mark.parametrize(
    ("text", "overrides", "steps"),
    [
        ("train: {nonfinite: abort, max_nonfinite_steps: 10}\n", [], 1),
        ("train: {max_nonfinite_steps: 3}\n", ["train.nonfinite=abort"], 1),
        ("train: {nonfinite: abort, max_nonfinite_steps: 10}\n", ["train.max_nonfinite_steps=5"], 5),
        ("train: {nonfinite: skip, max_nonfinite_steps: 3}\n", [], 3),
    ],
)
def test_nonfinite_abort_is_taken_over_unless_the_key_that_stays_comes_later(text, overrides, steps):
    config = config_from_yaml(text, "sft.yaml", overrides)
    assert config == Config(train=TrainConfig(max_nonfinite_steps=steps))


# --- where they may still stand ---------------------------------------------------------------------------------------


def test_python_config_that_gives_one_hears_what_to_write(tmp_path):
    head = "from trainer.schema import Config, ParallelConfig, TrainConfig\n"
    for call, message, hint in (
        (
            "parallel=ParallelConfig(\n    use_orig_params=True)",
            "parallel.use_orig_params is no key any more",
            "drop it; true, false: no effect, FSDP2 has no flat parameter and the mathematics is the same",
        ),
        (
            "train=TrainConfig(\n    nonfinite='abort')",
            "train.nonfinite is no key any more",
            "drop it; skip: always so; abort: train.max_nonfinite_steps=1 instead",
        ),
    ):
        (tmp_path / "sft.py").write_text(f"{head}config = Config({call})\n")
        with pytest.raises(ConfigError) as caught:
            load_config(tmp_path / "sft.py")
        assert (caught.value.message, caught.value.hint) == (message, hint)
        assert caught.value.where == f"{tmp_path / 'sft.py'}:3"


def test_word_without_its_section_is_answered_too():
    with pytest.raises(ConfigError, match=r"^use_orig_params is no key any more"):
        config_from_yaml("recipe: sft\n", "sft.yaml", ["use_orig_params=true"])


def test_config_of_an_older_job_is_read_in_silence_and_means_the_same():
    text = (OLD / "config.yaml").read_text().replace("@PYTHON@", "/usr/bin/python3").replace("@ROOT@", "/tmp/root")
    tree = yaml.safe_load(text)
    assert [key for key in DROPPED if key.split(".")[1] not in tree[key.split(".")[0]]] == []
    notes: list[str] = []
    config = config_from_yaml(text, "config.yaml", tell=notes.append)
    assert notes == []
    assert config_from_dict(tree) == config
    now = config_to_dict(config)
    old = [key for key in known_keys() if "." in key and key.split(".")[1] in tree[key.split(".")[0]]]
    assert len(old) > 100 and [key for key in old if get_key(config, key) != tree_value(tree, key)] == []
    assert {name: set(tree[name]) - set(now[name]) for name in ("train", "parallel")} == {
        "train": {"nonfinite"},
        "parallel": {key.split(".")[1] for key in DROPPED_WORDS},
    }


def tree_value(tree: dict[str, Any], key: str) -> Any:
    """What the older job's config says; a key that came since has its default."""
    section, name = key.split(".")
    return tree[section].get(name, get_key(Config(), key))


def test_resolved_config_names_none_of_them():
    text = config_to_yaml(config_from_yaml("parallel: {use_orig_params: true}\ntrain: {nonfinite: abort}\n", "a.yaml"))
    assert [key for key in DROPPED if f" {key.split('.')[1]}:" in text] == []
    assert "max_nonfinite_steps: 1\n" in text
