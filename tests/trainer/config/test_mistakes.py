"""All that is wrong with a config is told at once: a line each, and nothing that follows from another mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from deployer.errors import UsageError
from deployer.plan.options import Options, read_config
from trainer.commands import cli
from trainer.config.load import ConfigError, load_config

YAML = """\
train:
  step: 5
  qqqqq: 2
  micro_batch_size: many
  save_every: -3
data:
  train: [a.jsonl, {path: x, wieght: 2}, null]
trian: {a: 1}
parallel: {backward_prefetch: BACKWARD_POST, buffer_dtype: q}
model: {hidden_size: 33, num_heads: 4}
"""
LINES = [
    "{file}:2: train.step is not a key; did you mean train.steps?",
    "{file}:3: train.qqqqq is not a key",
    "{file}:4: train.micro_batch_size is 'many', expected a whole number",
    "{file}:7: data.train[1].wieght is not a key; keys here: path, weight, repeat, limit",
    "{file}:7: data.train[2] is null, expected text or a mapping of path, weight, repeat, limit; put it in quotes if"
    ' you mean the text: "null"',
    "{file}:8: trian is not a key; did you mean train?",
    "{file}:9: parallel.buffer_dtype is 'q', expected one of fp32, bf16, fp16",
    "the command line: lr is not a key; did you mean optim.learning_rate?",
    "the command line: optim.eps is 'x', expected a number",
    "{file}:9: parallel.backward_prefetch is BACKWARD_POST: FSDP2 has none, and FSDP1's was wrong for nested modules; "
    "drop it: BACKWARD_PRE is built in; to gather further ahead set parallel.backward_prefetch_depth=2",
    "{file}:5: train.save_every is -3, must be 0 or more",
    "{file}:10: model.hidden_size is 33, not a multiple of model.num_heads, 4; change one of them or set"
    " model.head_dim",
]


def mistakes(path: Path, *overrides: str, fsdp_config: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides, fsdp_config=fsdp_config)
    return str(caught.value)


@pytest.fixture
def bad_yaml(tmp_path: Path) -> Path:
    (tmp_path / "a.yaml").write_text(YAML)
    return tmp_path / "a.yaml"


def test_types_keys_dropped_words_and_rules_are_told_together(bad_yaml: Path) -> None:
    expected = [f"  {line.format(file=bad_yaml)}" for line in LINES]
    assert mistakes(bad_yaml, "lr=3", "optim.eps=x").split("\n") == [f"{len(LINES)} mistakes", *expected]


def test_train_and_deploy_say_the_same(bad_yaml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = mistakes(bad_yaml, "lr=3")
    with pytest.raises(SystemExit) as left:
        cli.main([str(bad_yaml), "lr=3"])
    assert (left.value.code, capsys.readouterr().err) == (2, f"Error: {told}\n")
    with pytest.raises(UsageError) as caught:
        read_config(Options(config=str(bad_yaml), overrides=("lr=3",)))
    assert [caught.value.message, *(f"  {line}" for line in caught.value.where)] == told.split("\n")


def test_one_mistake_is_told_as_ever(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("train: {step: 5}\n")
    assert mistakes(tmp_path / "a.yaml") == (
        f"train.step is not a key\n  in {tmp_path / 'a.yaml'}:1\nhint: did you mean train.steps?"
    )


def test_value_that_is_given_again_is_the_one_that_counts(bad_yaml: Path) -> None:
    told = mistakes(bad_yaml, "train.micro_batch_size=2")
    assert "micro_batch_size" not in told and told.startswith(f"{len(LINES) - 3} mistakes")


def test_unknown_keys_of_a_python_config_are_told_together_before_it_is_built(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text(
        "from trainer.schema import *\nconfig = Config(\n target=TargetConfig(zork=3),\n"
        " train=TrainConfig(stps=5, steps=3),\n optim=OptimConfig(lr=1),\n)\n"
    )
    assert mistakes(file).split("\n") == [
        "3 mistakes",
        f"  {file}:3: target.zork is not a key",
        f"  {file}:4: train.stps is not a key; did you mean train.steps?",
        f"  {file}:5: optim.lr is not a key; did you mean optim.learning_rate?",
    ]


def test_wrong_values_of_a_python_config_are_told_together(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text(
        "from trainer.schema import *\nconfig = Config(train=TrainConfig(steps='x', seed=None, save_every=-1))\n"
    )
    assert mistakes(file).split("\n") == [
        "3 mistakes",
        f"  {file}:2: train.steps is 'x', expected a whole number or null",
        f"  {file}:2: train.seed is null, expected a whole number",
        f"  {file}:2: train.save_every is -1, must be 0 or more",
    ]


def test_mistakes_beyond_fifty_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("train:\n" + "".join(f"  zz{number}: 1\n" for number in range(70)))
    told = mistakes(tmp_path / "a.yaml").split("\n")
    assert (told[0], told[-1], len(told)) == ("70 mistakes", "hint: 20 more follow", 52)


def test_what_follows_from_a_mistake_is_not_told(tmp_path: Path) -> None:
    """Neither that there is no model, nor that a wrong number keeps a rule."""
    (tmp_path / "a.yaml").write_text("model: {nmae: x, num_heads: q, hidden_size: 33}\n")
    assert "not a multiple" not in mistakes(tmp_path / "a.yaml")


def test_mistakes_of_accelerate_s_file_are_told_together(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("run: {name: x}\n")
    (tmp_path / "f.yaml").write_text("zork: 1\nmixed_precision: fp16\nnum_machines: 2\n")
    told = mistakes(tmp_path / "a.yaml", fsdp_config=tmp_path / "f.yaml").split("\n")
    assert told[0] == "3 mistakes" and len(told) == 4
