"""`run.sample_prompts`: what the model says on the way is what transformers makes of it, and changes nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from deployer.pull.choice import PullRequest
from deployer.pull.pieces import RemoteFile
from tests.support.configs import SMALL_MODEL, config_of, error_of
from tests.support.ranks import run_ranks
from tests.support.tiny import ALONE, tiny_decoder
from tests.support.trainings import build_of
from trainer.dist import Dist
from trainer.errors import ConfigError
from trainer.metrics.log import MetricsLog
from trainer.metrics.samples import SamplesLog
from trainer.parallel.blocks import eagerly
from trainer.recipes import pretrain, sft
from trainer.schema import SAMPLES_FILE, Config, RunConfig
from trainer.train import samples
from trainer.train.recipe import read_basis
from trainer.train.samples import Prompts, likeliest, sampler

PROMPTS = ["what is 7?", "na na"]
KEYS = {"sample_prompts": PROMPTS, "sample_tokens": 9}


def settings(rows: str, **sections: dict[str, Any]) -> Config:
    values: dict[str, Any] = {
        "model": {**SMALL_MODEL, "tie_embeddings": False},
        "data": {"train": [rows], "eval_fraction": 0.2, "seq_len": 96},
        "optim": {"learning_rate": 3e-2, "warmup_steps": 0},
        "train": {"steps": 4, "micro_batch_size": 2, "global_batch_size": 4, "eval_every": 2, "save_every": 0},
        "run": {},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return config_of(**values)


def train_rank(dist: Dist, rows: str, run_dir: str, sections: dict[str, Any]) -> None:
    Path(run_dir).mkdir(exist_ok=True)
    recipe = pretrain if sections.get("recipe") == "pretrain" else sft
    assert recipe.run(settings(rows, **sections), Path(run_dir), dist) == 0


def trained(ranks: int, rows: str, run_dir: Path, **sections: dict[str, Any]) -> list[list[Any]]:
    """Loss, gradient and held-out loss of each record, from a start on so many ranks."""
    if ranks == 1:
        train_rank(ALONE, rows, str(run_dir), sections)
    else:
        run_ranks(train_rank, ranks, rows, str(run_dir), sections)
    records = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [[record.get(key) for key in ("step", "loss", "grad_norm", "eval_loss")] for record in records]


def said(run_dir: Path) -> list[tuple[int, str, str]]:
    records = map(json.loads, (run_dir / "samples.jsonl").read_text().splitlines())
    return [(record["step"], record["prompt"], record["text"]) for record in records]


def theirs(folder: Path) -> list[str]:
    """The oracle: transformers' greedy generation from the export."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    texts = []
    for prompt in PROMPTS:
        turn = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False)
        texts.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
    return texts


@pytest.mark.parametrize(
    ("ranks", "sections"),
    [
        (1, {}),
        (2, {"target": {"gpu_ranks": [0, 1], "train_backend": "fsdp"}}),
        (1, {"lora": {"rank": 2, "dropout": 0.3, "merge_export": True}}),
    ],
)
def test_training_is_the_same_bit_for_bit_and_the_last_words_are_those_of_the_export(rows, tmp_path, ranks, sections):
    without = trained(ranks, rows, tmp_path / "without", **sections)
    keys = {**KEYS, "trackers": ["tensorboard"]}
    assert trained(ranks, rows, tmp_path / "with", **sections, run=keys) == without
    assert not (tmp_path / "without" / "samples.jsonl").exists()
    told = said(tmp_path / "with")
    assert [(step, prompt) for step, prompt, _ in told] == [(step, p) for step in (0, 2, 4) for p in PROMPTS]
    assert [text for step, _, text in told if step == 4] == theirs(tmp_path / "with" / "export")
    events = EventAccumulator(str(tmp_path / "with" / "tensorboard")).Reload()
    assert {tag.split("/")[1] for tag in events.Tags()["tensors"] if tag.startswith("samples/")} == {"0", "1"}


def test_without_held_out_rows_the_model_speaks_all_the_same(rows, tmp_path):
    (tmp_path / "a.txt").write_text("na na na na " * 40)
    data = {"train": [str(tmp_path / "a.txt")], "eval_fraction": 0, "seq_len": 16}
    config = {
        "recipe": "pretrain",
        "data": data,
        "run": {"sample_prompts": ["na"], "sample_tokens": 2, "export": False},
    }
    values = {"model": SMALL_MODEL, "train": {"steps": 2, "micro_batch_size": 2, "eval_every": 1}, **config}
    assert pretrain.run(config_of(**values), tmp_path, ALONE) == 0
    assert [(step, prompt) for step, prompt, _ in said(tmp_path)] == [(0, "na"), (1, "na"), (2, "na")]


def test_stop_ends_it_and_keeps_nothing(rows, tmp_path, monkeypatch):
    config = settings(rows, run={**KEYS, "export": False})
    run = build_of(config, tmp_path)
    basis = read_basis(sft.recipe(), config, ALONE)
    prompts = Prompts(config, basis.tokenizer, basis.shape)
    asked = []

    def is_stop_requested() -> bool:
        asked.append(1)
        return len(asked) == 3

    sampler(run, prompts)(0, is_stop_requested)
    assert len(asked) == 3 and not (tmp_path / "samples.jsonl").exists() and run.module.training
    prompts.ends = frozenset(range(260))  # whatever comes ends it
    assert [len(ids) for ids in likeliest(run, prompts, lambda: False) or []] == [1, 1]


def test_resumed_run_replaces_what_came_after_its_checkpoint(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl", total_steps=9, enabled=False)
    first = SamplesLog(tmp_path / "samples.jsonl", log, keep_through=0)
    for step in (0, 2, 4):
        first.write(step, [("a\n", f"said \x1b {step}")], seconds=0.1)
    again = SamplesLog(tmp_path / "samples.jsonl", log, keep_through=2)
    again.write(4, [("a\n", "anew")], seconds=0.1)
    assert said(tmp_path) == [(0, "a\n", "said \x1b 0"), (2, "a\n", "said \x1b 2"), (4, "a\n", "anew")]


def test_file_stays_small_and_a_full_disk_costs_the_samples_alone(tmp_path, monkeypatch, capsys):
    log = MetricsLog(tmp_path / "metrics.jsonl", total_steps=9)
    kept = SamplesLog(tmp_path / "samples.jsonl", log, keep_through=0)
    monkeypatch.setattr("trainer.metrics.samples.MOST_BYTES", 100)
    for step in range(3):
        kept.write(step, [("a", "b" * 30)], seconds=0.1)
    assert len(said(tmp_path)) == 1 and capsys.readouterr().out.count("no more samples are kept") == 1
    SamplesLog(tmp_path / "gone" / "samples.jsonl", log, keep_through=0).write(0, [("a", "b")], seconds=0.1)
    assert "training goes on" in capsys.readouterr().out


def test_file_comes_home_with_the_results_and_is_topped_up():
    assert SAMPLES_FILE in PullRequest().parts and RemoteFile(SAMPLES_FILE, 1, 0, "", 1).grows


def test_what_is_compiled_is_set_aside_and_comes_back():
    model = tiny_decoder()

    def compiled(*args: Any) -> None:
        raise AssertionError("of another shape")

    for block in model.blocks:
        block.forward = compiled
    ids = torch.zeros((1, 4), dtype=torch.int64)
    with eagerly(torch.nn.Sequential(model)):
        model(ids, torch.arange(4)[None], ids, packed=False)
    assert all(block.forward is compiled for block in model.blocks)


def test_prompts_have_bounds(rows):
    assert "run.sample_prompts has 17 texts, must be at most 16" in error_of(
        Config(run=RunConfig(sample_prompts=["a"] * 17))
    )
    assert "a text of 4,001 characters" in error_of(Config(run=RunConfig(sample_prompts=["a" * 4001])))
    config = settings(rows, run={"sample_prompts": ["a" * 200]}, model={**SMALL_MODEL, "max_position_embeddings": 128})
    basis = read_basis(sft.recipe(), config, ALONE)
    with pytest.raises(ConfigError, match="more than the model's 128 positions leave room for"):
        Prompts(config, basis.tokenizer, basis.shape)
    short = replace(config, run=replace(config.run, sample_prompts=["a" * 100]))
    assert 0 < Prompts(short, basis.tokenizer, basis.shape).most_new < 64
    assert samples.read_prompts(replace(config, run=RunConfig()), basis.tokenizer, basis.shape) is None
