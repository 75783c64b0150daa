"""Values on the command line: types, aliases, near names, and steps or epochs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.configs import override
from trainer.config.keys import aliases, known_facts, known_keys
from trainer.config.load import (
    num_processes,
)
from trainer.schema import (
    Config,
)

# --- overrides --------------------------------------------------------------------------------------------------------

OVERRIDES = [
    ("train.steps=50", 50),
    ("train.stop_after_steps= 7 ", 7),
    ("optim.learning_rate=1e-4", 0.0001),
    ("optim.learning_rate=1", 1.0),
    ("optim.weight_decay=.1", 0.1),
    ("target.gpu_ranks=[2,0]", [2, 0]),
    ("data.eval=", []),
    ("data.train=my.jsonl", ["my.jsonl"]),
    ("data.train=a.jsonl, b.jsonl", ["a.jsonl", "b.jsonl"]),
    ("data.train=['a,b.jsonl']", ["a,b.jsonl"]),
    ("data.train='a,b.jsonl'", ["a,b.jsonl"]),
    ("data.train=~/x=1/y.jsonl", ["~/x=1/y.jsonl"]),
    ("model.name=null", None),
    ("model.name=", None),
    ("model.name=123", "123"),
    ("data.system_prompt=You are: #1", "You are: #1"),
    ("data.system_prompt='null'", "null"),
    ("train.deterministic=true", True),
    ("train.deterministic=off", False),
    ("target.train_backend=ddp", "ddp"),
    ("target.env={A: 1, B: x y}", {"A": "1", "B": "x y"}),
    ("target.env.A=1=2", {"A": "1=2"}),
    ("target.env.A=", {"A": ""}),
    ("files=data/a,data/b", ["data/a", "data/b"]),
]


@pytest.mark.parametrize(("text", "value"), OVERRIDES)
def test_override_becomes_the_fields_type(text: str, value: object) -> None:
    config: Any = override(text)
    for name in text.partition("=")[0].removesuffix(".A").split("."):
        config = getattr(config, name)
    assert config == value
    assert type(config) is type(value)


def test_later_override_of_a_key_wins_and_variables_add_up() -> None:
    config = override("target.env.A=1", "target.env.B=2", "target.env.A=3", "run.name=a", "run.name=b")
    assert isinstance(config, Config)
    assert (config.target.env, config.run.name) == ({"A": "3", "B": "2"}, "b")


def test_gpu_ranks_take_a_number_of_gpus_to_choose() -> None:
    config = override("target.gpu_ranks=auto:2")
    assert isinstance(config, Config)
    assert (config.target.gpu_ranks, num_processes(config)) == (["auto:2"], 2)


def test_gpu_ranks_take_commas_and_uuids() -> None:
    config = override("target.gpu_ranks=GPU-8932f937-d72c,MIG-11112222")
    assert isinstance(config, Config)
    assert config.target.gpu_ranks == ["GPU-8932f937-d72c", "MIG-11112222"]


UNKNOWN = "is not a key\n  on the command line\nhint: did you mean"
OVERRIDE_ERRORS = [
    ("train", "Error: 'train' is not an override\n  on the command line\nhint: write KEY=VALUE, as in train.steps=50"),
    ("train.learning_rate=1e-4", f"Error: train.learning_rate {UNKNOWN} optim.learning_rate?"),
    ("learning_rate=1e-4", f"Error: learning_rate {UNKNOWN} optim.learning_rate?"),
    ("lr=1e-4", f"Error: lr {UNKNOWN} optim.learning_rate?"),
    ("trian.step=4", f"Error: trian.step {UNKNOWN} train.steps?"),
    ("name=x", f"Error: name {UNKNOWN} model.name or run.name?"),
    (
        "target.zzz=1",
        "Error: target.zzz is not a key\n  on the command line\n"
        "hint: keys of target: gpu_ranks, train_backend, device, ssh, python, root, env, secrets",
    ),
    (
        "zzz=1",
        "Error: zzz is not a key\n  on the command line\nhint: sections: target, model, lora, data, optim, train, par",
    ),
    (
        "run=x",
        "Error: run is a section, not a key\n  on the command line\nhint: keys of run: name, dir, export",
    ),
    ("=5", "Error: '=5' is not an override\n  on the command line\nhint: write KEY=VALUE, as in train.steps=50"),
    ("train.steps=many", "Error: train.steps is 'many', expected a whole number or null\n  on the command line"),
    ("train.steps=1.5", "Error: train.steps is 1.5, expected a whole number or null\n  on the command line"),
    ("train.steps=0x10", "Error: train.steps is '0x10', expected a whole number or null\n  on the command line"),
    ("train.seed=true", "Error: train.seed is true, expected a whole number\n  on the command line"),
    ("train.seed=", "Error: train.seed is empty, expected a whole number\n  on the command line"),
    ("train.seed=" + "9" * 90, f"Error: train.seed is {'9' * 77}…, expected a whole number\n  on the command line"),
    ("train.deterministic=1", "Error: train.deterministic is 1, expected true or false\n  on the command line"),
    ("optim.eps=nan", "Error: optim.eps is 'nan', expected a number\n  on the command line"),
    ("optim.eps=1e999", "Error: optim.eps is 1e999, expected a number\n  on the command line"),
    (
        "target.train_backend=FDSP",
        "Error: target.train_backend is 'FDSP', expected one of auto, pytorch, ddp, fsdp\n  on the command line\n"
        "hint: did you mean fsdp?",
    ),
    (
        "run.name=null",
        "Error: run.name is null, expected text\n  on the command line\n"
        'hint: put it in quotes if you mean the text: "null"',
    ),
    (
        "data.train=[a, [b]]",
        "Error: data.train[1] is ['b'], expected text or a mapping of path, weight, repeat, limit\n  on the command",
    ),
    ("data.train=[a", "Error: not valid YAML: expected ',' or ']', but got the end of the text\n  on the command line"),
    ("target.env=5", "Error: target.env is 5, expected a mapping of names to text\n  on the command line"),
    (
        "target.env.A=a\0b",
        "Error: target.env.A is 'a\\x00b', expected text without NUL and of valid UTF-8\n  on the command",
    ),
    ("target.gpu_ranks=0,0", "Error: target.gpu_ranks is [0, 0]: it names 0 twice\n  on the command line\nhint: name"),
    (
        "optim.warmup_steps=500",
        "Error: optim.warmup_steps is 500, more than train.steps, 60\n  on the command line\n"
        "hint: set optim.warmup_steps=6",
    ),
]


@pytest.mark.parametrize(("text", "error"), OVERRIDE_ERRORS)
def test_wrong_override_gives_one_error(text: str, error: str) -> None:
    message = override(text)
    assert isinstance(message, str)
    assert message.startswith(error)


def test_every_alias_names_one_key_and_is_none_itself() -> None:
    leaves = {key.rpartition(".")[2] for key in known_keys()}
    given = [alias for facts in known_facts().values() for alias in facts.aliases]
    assert sorted(given) == sorted(aliases())
    assert not leaves & set(given)


# --- steps or epochs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "overrides", "steps", "epochs"),
    [
        ("train: {epochs: 2}", [], None, 2.0),
        ("train: {steps: 30}", [], 30, None),
        ("train: {steps: 30}", ["train.epochs=2"], None, 2.0),
        ("train: {epochs: 2}", ["train.steps=30"], 30, None),
        ("train: {steps: null, epochs: 0.5}", [], None, 0.5),
        ("train: {steps: 30}", ["train.epochs=null"], 30, None),
        ("train: {steps: 30}", ["train.epochs=2", "train.steps=null"], None, 2.0),
    ],
)
def test_giving_one_of_steps_and_epochs_drops_the_other(
    load_config_file: Any, text: str, overrides: list[str], steps: int | None, epochs: float | None
) -> None:
    config = load_config_file("a.yaml", text, *overrides)
    assert (config.train.steps, config.train.epochs) == (steps, epochs)


def test_steps_and_epochs_from_one_source_are_an_error(load_config_file: Any) -> None:
    first = "Error: train.steps is 30 and train.epochs is 2: only one may say how long to train\n"
    assert load_config_file("a.yaml", "train:\n  steps: 30\n  epochs: 2\n").startswith(f"{first}  in a.yaml:3\n")
    assert load_config_file("a.yaml", "run: {}", "train.steps=30", "train.epochs=2").startswith(
        f"{first}  on the command line\n"
    )
