"""`train.py generate`: what transformers itself generates, from whatever a run leaves behind."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from tests.first_hour.models import write_model
from tests.support.ferry import REPO
from tests.trainer.checkpoint.test_export_command import make_run
from trainer.commands.generate import generate
from trainer.errors import UserError

ASKED = "what is 7?"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "base")


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Path:
    """A run of adapters over it, with an adapter that changes what is said."""
    sections = {"model": {"name": str(base)}, "lora": {"rank": 2}, "optim": {"learning_rate": 0.5}}
    return make_run(tmp_path_factory.mktemp("lora"), 1, **sections)


def call(*words: object, stdin: str = "") -> Result:
    return CliRunner().invoke(generate, [str(word) for word in (*words, "--device", "cpu")], input=stdin)


def said(*words: object, **how: Any) -> str:
    done = call(*words, "--json", "--max-tokens", 12, **how)
    assert done.exit_code == 0, (done.output, done.exception)
    (sample,) = json.loads(done.stdout)["samples"]
    assert 1 <= sample["tokens"] <= 12 and sample["ended"] == (sample["tokens"] < 12)
    return sample["text"]


def refused(*words: object) -> UserError:
    done = call(*words)
    assert isinstance(done.exception, UserError), done.output
    return done.exception


def theirs(folder: Path, *, adapter: Path | None = None, chat: bool = True, text: str = ASKED) -> str:
    """The oracle: transformers' pipeline of template, greedy generation and decoding, with PEFT's adapter."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model = PeftModel.from_pretrained(model, adapter) if adapter else model
    if chat:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=not chat)["input_ids"]
    out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def test_folder_says_what_transformers_generates_from_it(base: Path) -> None:
    assert said(base, ASKED) == said(base, "-", stdin=f"{ASKED}\n") == said(base, stdin=ASKED) == theirs(base)
    assert said(base, ASKED, "--no-chat") == theirs(base, chat=False) != theirs(base)
    assert len({said(base, ASKED), said(base, ASKED, "--system", "be brief"), said(base, "what is 8?")}) == 3


def test_draws_are_repeatable_and_follow_the_seed(base: Path) -> None:
    drawn = {said(base, ASKED, "--temperature", 1, "--seed", seed) for seed in (0, 0, 1, 2)}
    assert 2 <= len(drawn) <= 3 and theirs(base) not in drawn
    assert said(base, ASKED, "--temperature", 1, "--top-p", 1e-6) == theirs(base)


def test_adapter_is_put_over_its_base_as_peft_does(base: Path, lora: Path, tmp_path: Path) -> None:
    adapter = lora / "export" / "adapter"
    expected = theirs(base, adapter=adapter)
    assert expected != theirs(base)
    assert said(lora, ASKED) == said(adapter, ASKED) == said(base, ASKED, "--adapter", adapter) == expected
    assert said(lora, ASKED, "--step", 2) == expected  # of its checkpoint
    moved = tmp_path / "moved"
    shutil.copytree(adapter, moved)
    config = json.loads((moved / "adapter_config.json").read_text())
    (moved / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "models/gone/x"}))
    assert "is of models/gone/x, and that folder is not here" in refused(moved, ASKED).message
    assert said(moved, ASKED, "--base", base) == expected
    write_model(tmp_path / "wide", hidden_size=64)
    assert "is an adapter of another model" in refused(tmp_path / "wide", ASKED, "--adapter", adapter).message


def test_run_without_an_export_speaks_by_its_newest_checkpoint(
    lora: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, 1, data={"seq_len": 48})
    exported = said(run / "export", ASKED)
    shutil.move(run / "export", tmp_path / "export")
    assert said(run, ASKED) == said(run / "checkpoints" / "step_000002", ASKED) == exported
    assert exported == theirs(tmp_path / "export")
    monkeypatch.chdir(tmp_path)
    shutil.copytree(run, tmp_path / "results" / "job-1")
    assert said("job-1", ASKED) == exported
    shutil.rmtree(run / "checkpoints")
    assert "holds no model" in refused(run, ASKED).message


def test_several_prompts_are_told_apart_and_control_characters_are_shown(base: Path) -> None:
    done = call(base, "a\x1b[2J", "b", "--max-tokens", 3)
    heads = [line for line in done.stdout.splitlines() if line.startswith("> ")]
    assert heads == ["> a\\x1b[2J", "> b"] and done.exit_code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("{base}", " "), "a prompt is empty"),
        (("{base}x", "a"), "there is no run or model folder"),
        (("{base}/..", "a"), "holds no model"),
        (("{base}", "a", "--step", "3"), "no complete checkpoint"),
        (("{base}", "a", "--no-chat", "--system", "b"), "--system belongs to a conversation"),
        (("{base}", "a", "--adapter", "{base}"), "is no PEFT adapter"),
        (("{base}", "a" * 40_000), "positions: shorten it"),
        (("{base}", "a", "--base", "{base}"), "--base is the model that an adapter is of"),
    ],
)
def test_mistakes_are_told(base: Path, words: tuple[str, ...], message: str) -> None:
    assert message in refused(*(word.format(base=base) for word in words)).message


def test_weights_that_do_not_fit_are_refused_before_they_are_read(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.export.generate.available_bytes", lambda: 1000)
    error = refused(base, ASKED)
    assert "of weights, and 0.00 MiB are free on this machine" in error.message


def test_code_of_a_folder_is_never_run(base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "foreign"
    shutil.copytree(base, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoModelForCausalLM": "code.Model", "AutoConfig": "code.Config"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text("open('ran', 'w')\n")
    assert "does not load in transformers" in refused(folder, ASKED, "--tokenizer", base).message
    assert not Path("ran").exists()


def test_torchferry_becomes_it(base: Path) -> None:
    argv = [sys.executable, str(REPO / "deploy.py"), "generate", str(base), "-", "--max-tokens", "2", "--device", "cpu"]
    done = subprocess.run(argv, input=ASKED.encode(), capture_output=True)
    assert done.returncode == 0 and done.stdout.endswith(b"\n"), done.stderr.decode()
