"""`train.py init` writes configs that are valid as they stand; `train.py keys` finds what people look for."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.support.ferry import REPO
from trainer.commands.init import init
from trainer.commands.keys import keys
from trainer.config.keys import known_keys
from trainer.config.load import load_config
from trainer.errors import UserError
from trainer.schema.first_config import KINDS, render


def shown(*words: str) -> Result:
    return CliRunner().invoke(keys, list(words))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "run"), [("my.yaml", "my"), ("1e3.yaml", "1e3"), ("-a: b.yaml", "a-b"), ("ü.yaml", None)]
)
def test_config_is_valid_and_says_what_was_asked_for(tmp_path: Path, kind: str, name: str, run: str | None) -> None:
    file = tmp_path / name
    words = [kind, "--model", "models/yes", "--data", "{my} rows.jsonl", "--out", str(file)]
    done = CliRunner().invoke(init, words)
    typed = shlex.quote(str(file))
    assert done.exit_code == 0 and done.output == f"{file} is written. Next: python train.py {typed} --inspect\n"
    config = load_config(file)
    assert (config.run.name, config.model.name, config.data.train) == (run or kind, "models/yes", ["{my} rows.jsonl"])
    assert config.recipe == ("pretrain" if kind == "pretrain" else "sft")
    assert config.lora.rank == (16 if kind == "lora" else None)
    assert config.target.gpu_ranks == ["auto:1"]
    first, *lines = file.read_text().splitlines()
    assert first.endswith(f"python train.py {typed} --inspect") and max(map(len, lines)) <= 140 and len(lines) < 25


def test_file_that_is_there_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lora.yaml").write_text("mine\n")
    done = CliRunner().invoke(init, ["lora"])
    assert isinstance(done.exception, UserError) and str(done.exception).startswith(
        "lora.yaml is there already\nhint: "
    )
    assert Path("lora.yaml").read_text() == "mine\n"
    assert CliRunner().invoke(init, ["lora", "--out", "-"]).output == render("lora", "lora.yaml")


def test_lora_config_of_the_repository_is_the_one_that_init_writes() -> None:
    assert (REPO / "configs" / "04_lora_sft.yaml").read_text() == render("lora", "configs/04_lora_sft.yaml")


def test_each_key_is_shown_once_with_its_default() -> None:
    found = {row["key"]: row for row in json.loads(shown("--json").output)}
    assert found.keys() == known_keys().keys()
    assert (found["train.micro_batch_size"]["default"], found["train.epochs"]["default"]) == ("4", "null")
    assert all(row["meaning"] and row["kind"] for row in found.values())


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("max_steps", "train.steps"),  # another tool's name
        ("LORA.RANK", "lora.rank"),
        ("torchrun --nproc", "target.gpu_ranks"),
        ("warm-up", "optim.learning_rate"),  # in the meaning alone
    ],
)
def test_key_is_found_by_what_people_call_it(word: str, key: str) -> None:
    lines = shown(word).output.splitlines()
    assert any(line.startswith(f"{key} [") for line in lines), lines


def test_word_that_no_key_has_is_a_mistake_with_what_is_near() -> None:
    error = shown("micro_batch_sise").exception
    assert isinstance(error, UserError) and error.message == "no key of a config has 'micro_batch_sise'"
    assert error.hint.startswith("near it: micro_batch_size")
