"""What defaults become for a run, what a resumed one keeps, and which step's weights are exported."""

from __future__ import annotations

import json
import shutil
from itertools import chain, repeat
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.support.configs import SMALL_MODEL, config_of
from tests.support.ranks import run_ranks
from tests.support.tiny import ALONE
from tests.support.trainings import build_of, train, training_on
from trainer.checkpoint.folders import steps_in
from trainer.checkpoint.load import read_full, read_info
from trainer.checkpoint.resume import check_optimizer
from trainer.dist import Dist
from trainer.errors import ConfigError
from trainer.export.finish import finish
from trainer.models.hf import gather_full
from trainer.optim.build import build_optimizer, had_8bit_embeddings
from trainer.recipes import sft
from trainer.schema import Config, OptimConfig, with_changes
from trainer.train import loop
from trainer.train.recipe import read_basis
from trainer.train.resolve_defaults import foresee, resolve_defaults
from trainer.train.run import Evaluated
from trainer.train.step import apply_update

# --- the learning rate ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sections", "rate", "what"),
    [
        ({}, 1e-3, "random weights"),
        ({"model": {"name": "some/model", "init": "random"}}, 1e-3, "random weights"),
        ({"model": {"name": "some/model"}}, 1e-5, "the weights of a pretrained model"),
        ({"model": {"name": "some/model", "freeze": ["*.mlp.*"]}}, 1e-5, "the weights of a pretrained model"),
        ({"model": {"name": "some/model"}, "lora": {"rank": 8}}, 2e-4, "LoRA"),
        ({"model": {"name": "some/model"}, "lora": {"adapter": "here"}}, 2e-4, "LoRA"),
    ],
)
def test_rate_that_is_not_given_is_that_of_the_kind_of_training_and_is_said(sections, rate, what):
    resolved = foresee(config_of(**sections))
    assert resolved.config.optim.learning_rate == rate
    assert f"learning rate: {rate:g}, for {what} (optim.learning_rate is null)" in resolved.lines


def test_rate_that_is_given_is_taken_in_silence():
    resolved = foresee(config_of(optim={"learning_rate": 0.5}))
    assert (resolved.config.optim.learning_rate, resolved.lines) == (0.5, [])


def test_resumed_run_keeps_its_rate_also_where_the_default_is_another(rows, tmp_path, capfd):
    fields = {"save_every": 2, "eval_every": 0}
    train(1, rows, tmp_path, **fields, stop_after_steps=2)  # at a rate of its own
    config = with_changes(training_on(rows, **fields), {"optim.learning_rate": None})
    capfd.readouterr()
    sft.run(config, tmp_path, ALONE)
    told = capfd.readouterr().out
    assert "learning rate: 0.01, as the checkpoint has it (optim.learning_rate is null)" in told
    assert "changed since the checkpoint" not in told
    newest = list(steps_in(tmp_path / "checkpoints").values())[-1]
    assert read_info(newest).extra["config"]["optim"]["learning_rate"] == 0.01


def test_least_rate_above_the_settled_one_is_refused(rows, tmp_path):
    train(1, rows, tmp_path, save_every=2, eval_every=0, stop_after_steps=2)
    config = with_changes(training_on(rows), {"optim.learning_rate": None, "optim.min_learning_rate": 0.02})
    with pytest.raises(ConfigError, match=r"min_learning_rate is 0.02, more than the rate 0.01, as the checkpoint"):
        resolve_defaults(config, ALONE, tmp_path)


# --- 8-bit state of embeddings ----------------------------------------------------------------------------------------


def moved_furthest(optim: OptimConfig) -> float:
    """How far an entry of an embedding moves in four steps whose gradients are of many sizes within a token's row."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(1008, 128))
    optimizer, weight = build_optimizer(model, optim), model[0].weight
    before = weight.detach().clone()
    for _ in range(4):
        weight.grad = torch.randn_like(weight) * torch.logspace(0, -3, 128)
        apply_update(optimizer, 0.002, torch.tensor(True))
    return float((weight.detach() - before).abs().max())


def test_embeddings_move_as_with_adamw_unless_8_bits_are_asked_for():
    ours, adamw, all_in_8_bits = (
        moved_furthest(OptimConfig(learning_rate=0.002, **fields))
        for fields in ({"optimizer": "adamw8bit"}, {}, {"optimizer": "adamw8bit", "embeddings_8bit": True})
    )
    assert ours == pytest.approx(adamw, rel=0.05) and adamw < 0.01
    assert all_in_8_bits > 3 * adamw


def test_run_says_which_state_has_8_bits_and_keeps_it_when_it_resumes(rows, tmp_path, capfd):
    fields = {"save_every": 2, "eval_every": 0, "stop_after_steps": 2}
    wide = {"model.hidden_size": 128, "optim.optimizer": "adamw8bit"}
    sizes = {}
    for asked, said in (
        (None, "that of embeddings has 32 bits (optim"),
        (True, "that of embeddings too, as the checkp"),
    ):
        folder = tmp_path / str(asked)
        folder.mkdir()
        config = with_changes(training_on(rows, **fields), wide | {"optim.embeddings_8bit": asked})
        sft.run(config, folder, ALONE)
        sizes[asked] = sum(file.stat().st_size for file in folder.glob("checkpoints/*/*.distcp"))
        sft.run(with_changes(config, {"optim.embeddings_8bit": None}), folder, ALONE)
        told = capfd.readouterr().out
        assert said in told and "changed since the checkpoint" not in told
        saved = read_info(list(steps_in(folder / "checkpoints").values())[-1]).extra["config"]
        assert saved["optim"]["embeddings_8bit"] == bool(asked)
    vocab = json.loads((tmp_path / "None" / "checkpoints" / "step_000002" / "state.json").read_text())["shape"]
    assert sizes[None] - sizes[True] > 0.9 * 2 * 3 * 128 * vocab["vocab_size"]  # two moments, three bytes less each


def test_checkpoint_from_before_there_was_a_word_for_it_has_8_bits(tmp_path):
    assert had_8bit_embeddings({"optimizer": "adamw8bit"})
    assert not had_8bit_embeddings({"optimizer": "adamw8bit", "embeddings_8bit": False})
    assert not had_8bit_embeddings({"optimizer": "adamw"})
    optimizer = build_optimizer(
        nn.Sequential(nn.Embedding(64, 128)),
        OptimConfig(learning_rate=1e-3, optimizer="adamw8bit", embeddings_8bit=False),
    )
    with pytest.raises(ConfigError, match="holds 8-bit state of embeddings, which cannot become 32-bit"):
        check_optimizer(tmp_path, {"optim": {"optimizer": "adamw8bit"}}, optimizer)


# --- which step is exported -------------------------------------------------------------------------------------------


def exporting(rows: str, *, source: str = "auto", **fields) -> Config:
    config = training_on(rows, eval_every=1, save_every=0, keep_last=1, **fields)
    return with_changes(config, {"run.export": True, "run.export_from": source})


def judged(dist: Dist, config: Config, folder: str, losses: list[float], loses: str = "", spoils: str = "") -> dict:
    """A run whose held-out losses are these (before the first step, after it, …): what it exports, and outcome.json.
    `loses`, `spoils`: a checkpoint that somebody removes or cuts before the export."""
    run_dir = Path(folder)
    run_dir.mkdir(exist_ok=True)
    run = build_of(config, run_dir, dist)
    script = chain(losses, repeat(losses[-1]))
    run.evaluate = lambda run, is_stop_requested: Evaluated(next(script), 1)
    basis = read_basis(sft.recipe(), config, dist)
    result = loop.train(run)
    if loses:
        shutil.rmtree(run_dir / "checkpoints" / loses)
    for file in (run_dir / "checkpoints" / spoils).glob("*.distcp") if spoils else ():
        file.write_bytes(file.read_bytes()[:-1])
    finish(run, result, shape=basis.shape, tokenizer=basis.tokenizer)
    gather_full(run.module, dist)
    return json.loads((run_dir / "outcome.json").read_text())


def exported_weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "export" / "model.safetensors")


def weights_of_step(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return read_full(folder / "checkpoints" / f"step_{step:06}")["model"]


def is_of_step(folder: Path, step: int) -> bool:
    exported, saved = exported_weights(folder), weights_of_step(folder, step)
    return all(torch.equal(exported[name], tensor) for name, tensor in saved.items())


WORSE = [5.0, 4.0, 3.0, 3.5, 3.6, 3.7]
"""The second step is the best."""


def test_run_that_stops_early_exports_its_best_step_and_keeps_it(rows, tmp_path, capfd):
    outcome = judged(ALONE, exporting(rows, early_stop_patience=2), str(tmp_path), WORSE)
    assert (outcome["steps"], outcome["exported_step"], outcome["eval_step_best"]) == (4, 2, 2)
    assert list(steps_in(tmp_path / "checkpoints")) == [2, 4]
    assert is_of_step(tmp_path, 2) and not is_of_step(tmp_path, 4)
    told = capfd.readouterr().out
    assert "the weights of step_000002 are exported, whose held-out loss, 3.0000, was the lowest" in told
    assert "held-out loss 5.0000 -> 3.6000 (-28%), lowest 3.0000 after step 2; exported: step 2" in told
    assert "warning" not in told


def test_best_step_is_exported_on_several_ranks_too(rows, tmp_path):
    config = exporting(rows, early_stop_patience=2, backend="fsdp")
    outcomes = run_ranks(judged, 2, config, str(tmp_path), WORSE)
    assert [outcome["exported_step"] for outcome in outcomes] == [2, 2]
    assert is_of_step(tmp_path, 2)


@pytest.mark.parametrize(("source", "patience", "step"), [("best", None, 2), ("last", 2, 4), ("auto", None, 8)])
def test_step_that_is_exported_is_the_one_asked_for(rows, tmp_path, source, patience, step):
    config = exporting(rows, source=source, early_stop_patience=patience)
    outcome = judged(ALONE, config, str(tmp_path), WORSE)
    assert outcome["exported_step"] == step
    assert is_of_step(tmp_path, step)
    assert list(steps_in(tmp_path / "checkpoints")) == ([2, 8] if source == "best" else [outcome["steps"]])


def test_run_that_only_got_worse_says_so_and_exports_the_best_that_it_has(rows, tmp_path, capfd):
    outcome = judged(ALONE, exporting(rows, early_stop_patience=3), str(tmp_path), [2.0, 2.5, 3.0, 3.5])
    assert (outcome["exported_step"], outcome["eval_step_best"]) == (1, 0)
    told = capfd.readouterr().out
    assert "warning: the held-out loss is no lower than before the first step, 2.0000" in told
    assert is_of_step(tmp_path, 1)


def test_best_checkpoint_that_is_gone_is_told(rows, tmp_path, capfd):
    outcome = judged(ALONE, exporting(rows, early_stop_patience=2), str(tmp_path), WORSE, loses="step_000002")
    assert outcome["exported_step"] == 4
    gone = "warning: the checkpoint of step 2 with the lowest held-out loss, 3.0000, is not there any more: the best of"
    assert f"{gone} the others, step 4, is exported" in capfd.readouterr().out


def test_best_checkpoint_that_is_damaged_is_told_and_the_last_step_exported(rows, tmp_path, capfd):
    outcome = judged(ALONE, exporting(rows, early_stop_patience=2), str(tmp_path), WORSE, spoils="step_000002")
    assert (outcome["exported_step"], outcome["state"]) == (4, "succeeded")
    told = capfd.readouterr().out
    assert "warning: cannot load" in told and "the weights of the last step are exported" in told
    assert is_of_step(tmp_path, 4)


def test_best_of_no_held_out_data_is_refused():
    with pytest.raises(ConfigError, match=r"run.export_from is best, but there is no held-out data to judge by"):
        config_of(model=SMALL_MODEL, data={"eval_fraction": 0}, run={"export_from": "best"})
    with pytest.raises(ConfigError, match=r"train.eval_every is 0: no step before the last is judged"):
        config_of(model=SMALL_MODEL, train={"eval_every": 0}, run={"export_from": "best"})
