"""What a start does with a damaged checkpoint, and with one of another run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.support.ranks import run_ranks
from tests.support.saves import as_of_format_2, change_state
from tests.support.tiny import ALONE
from tests.support.trainings import build, build_of, losses, train, training_on
from trainer.checkpoint.errors import CheckpointError
from trainer.checkpoint.folders import set_aside, steps_in
from trainer.checkpoint.resume import check_optimizer, render_horizon
from trainer.config.load import config_from_dict, config_to_dict
from trainer.data.loader import build_data
from trainer.data.tokenize.tokenizer import build_bytes_tokenizer
from trainer.dist import Dist
from trainer.errors import ConfigError, ModelError
from trainer.recipes.causal_lm import CausalLM
from trainer.schema import OptimConfig
from trainer.train import loop
from trainer.train.plan_log import log_plan

FIELDS = {"save_every": 2, "eval_every": 0, "keep_last": 0, "micro_batch_size": 6}


@pytest.fixture(scope="module")
def saved(rows, tmp_path_factory) -> Path:
    """The folder of a run on two ranks that stopped after step 4 and saved at 2 and 4."""
    run_dir = tmp_path_factory.mktemp("saved") / "run"
    run_ranks(resume, 2, rows, [str(run_dir)], {"stop_after_steps": 4})
    return run_dir


@pytest.fixture
def run_dir(saved, tmp_path) -> Path:
    """A copy of it, to damage."""
    return shutil.copytree(saved, tmp_path / "run")


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:100])


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def copy_former(file: Path) -> None:
    shutil.copyfile(file.parent.with_name("step_000002") / file.name, file)


DAMAGES = {
    "shard cut": ("__1_0.distcp", truncate, "__1_0.distcp has 100 bytes, not"),
    "shard changed": ("__0_0.distcp", flip, "__0_0.distcp has other content than was written"),
    "shard gone": ("__0_0.distcp", Path.unlink, "__0_0.distcp cannot be read: No such file"),
    "random state cut": ("random_1.pt", truncate, "random_1.pt has 100 bytes"),
    "state empty": ("state.json", lambda file: file.write_text(""), "state.json has 0 bytes, not "),
    "state changed": ("state.json", flip, "state.json has other content than was written"),
    "state of another step": ("state.json", copy_former, "step_000004: state.json has "),
    "marker of another step": ("COMPLETE", copy_former, "step_000004: state.json has "),
    "marker cut": ("COMPLETE", lambda file: file.write_bytes(file.read_bytes()[:9]), "COMPLETE has other content than"),
    "marker empty": ("COMPLETE", lambda file: file.write_text(""), "COMPLETE is empty, and holds the checksum of"),
    "shard of more ranks": ("__2_0.distcp", lambda file: file.write_bytes(b"x"), "__2_0.distcp is not of this check"),
    "marker gone": ("COMPLETE", Path.unlink, "step_000004 is not complete: it has no COMPLETE file"),
    "metadata gone": (".metadata", Path.unlink, "step_000004 is not complete: it has no .metadata file"),
}


def resume(dist: Dist, rows: str, run_dirs: list[str], fields: dict) -> int:
    """Start, train to the end; the step that this rank began at. Each rank may see another run folder."""
    run = build(rows, Path(run_dirs[min(dist.rank, len(run_dirs) - 1)]), dist, **{**FIELDS, **fields})
    loop.train(run)
    run.log.close()
    return run.start_step


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_newest_checkpoint_is_named_set_aside_and_the_one_before_taken(rows, run_dir, damage, capfd):
    name, spoil, message = DAMAGES[damage]
    spoil(run_dir / "checkpoints" / "step_000004" / name)
    assert resume(ALONE, rows, [str(run_dir)], {"backend": "pytorch"}) == 2
    told = capfd.readouterr().out
    assert message in told
    assert "it is .bad_step_000004 now" in told
    assert "going on from step_000002" in told
    assert (run_dir / "checkpoints" / ".bad_step_000004" / "random_0.pt").exists()
    assert 4 in steps_in(run_dir / "checkpoints")  # saved again


def test_run_after_a_fall_back_ends_like_the_unbroken_one(rows, run_dir, tmp_path):
    truncate(run_dir / "checkpoints" / "step_000004" / "__1_0.distcp")
    assert run_ranks(resume, 2, rows, [str(run_dir)], {}) == [2, 2]
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert losses(records) == losses(train(2, rows, tmp_path / "whole", **FIELDS))


def test_ranks_that_see_other_folders_go_on_from_what_rank_0_sees(rows, run_dir, tmp_path):
    (tmp_path / "other").mkdir()
    assert run_ranks(resume, 2, rows, [str(run_dir), str(tmp_path / "other")], {}) == [4, 4]


@pytest.mark.parametrize("name", ["__1_0.distcp", "state.json"])
def test_no_checkpoint_left_is_an_error_and_nothing_is_renamed(rows, run_dir, name):
    for step in (2, 4):
        truncate(run_dir / "checkpoints" / f"step_{step:06d}" / name)
    with pytest.raises(
        CheckpointError, match=r"none of the 2 checkpoints .* can be loaded: step_000004: .*; step_000002: "
    ):
        build(rows, run_dir, ALONE, backend="pytorch", **FIELDS)
    assert list(steps_in(run_dir / "checkpoints")) == [2, 4]


def test_incomplete_checkpoints_alone_are_set_aside_and_told_and_the_run_begins_anew(rows, run_dir, capfd):
    for step in (2, 4):
        (run_dir / "checkpoints" / f"step_{step:06d}" / "COMPLETE").unlink()
    assert resume(ALONE, rows, [str(run_dir)], {"backend": "pytorch"}) == 0
    told = capfd.readouterr().out
    assert "step_000004 is not complete: it has no COMPLETE file; it is .bad_step_000004 now" in told
    assert "beginning anew: there is no other checkpoint" in told
    assert all((run_dir / "checkpoints" / f".bad_step_{step:06d}" / "random_0.pt").exists() for step in (2, 4))


def test_incomplete_checkpoint_below_a_damaged_one_is_set_aside_and_told_too(rows, run_dir, capfd):
    second, third = (run_dir / "checkpoints" / f"step_{step:06d}" for step in (4, 6))
    shutil.copytree(second, third)  # of another step than its name's
    (second / "COMPLETE").unlink()
    assert resume(ALONE, rows, [str(run_dir)], {"backend": "pytorch"}) == 2
    told = capfd.readouterr().out
    assert "step_000004 is not complete: it has no COMPLETE file; it is .bad_step_000004 now" in told
    assert "it is .bad_step_000006 now" in told and "going on from step_000002" in told
    assert (run_dir / "checkpoints" / ".bad_step_000004" / "random_0.pt").exists()


def test_checkpoint_is_set_aside_also_where_one_that_was_set_aside_has_been_removed(tmp_path):
    for name in ("step_000004", ".bad_step_000004_1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.json").write_text(name)
    assert set_aside(tmp_path / "step_000004").name == ".bad_step_000004"
    (tmp_path / "step_000004").mkdir()
    assert set_aside(tmp_path / "step_000004").name == ".bad_step_000004_2"
    assert (tmp_path / ".bad_step_000004_1" / "state.json").read_text() == ".bad_step_000004_1"


def test_state_without_its_place_in_the_data_is_a_damage(rows, run_dir, capfd):
    change_state(run_dir / "checkpoints" / "step_000004", data=None)
    assert build(rows, run_dir, ALONE, backend="pytorch", **FIELDS).start_step == 2
    assert "state.json does not say what a save writes there: data" in capfd.readouterr().out


OLD_DAMAGES = {
    "too deep": (lambda state: "[" * 200_000, "state.json: it is nested too deep"),
    "empty": (lambda state: "", "state.json: it is empty, not JSON"),
    "of another kind": (lambda state: "[]", "state.json: it is [], not an object"),
    "of another step": (lambda state: json.dumps({**state, "step": 5}), "state.json is of step 5, not of the step in"),
    "at another step of the data": (
        lambda state: json.dumps({**state, "data": {**state["data"], "step": 5}}),
        "state.json is of step 4, and its place in the data is after step 5",
    ),
    "of more ranks": (lambda state: json.dumps({**state, "world_size": 3}), "world_size 3 and random states of the ra"),
    "of a number in words": (
        lambda state: json.dumps({**state, "step": "4"}),
        "state.json: step is '4', not a whole number",
    ),
}


@pytest.mark.parametrize("damage", OLD_DAMAGES)
def test_damage_of_an_earlier_versions_checkpoint_is_told_by_what_contradicts_it(rows, run_dir, damage, capfd):
    spoil, message = OLD_DAMAGES[damage]
    newest = run_dir / "checkpoints" / "step_000004"
    as_of_format_2(newest)
    (newest / "state.json").write_text(spoil(json.loads((newest / "state.json").read_text())))
    assert build(rows, run_dir, ALONE, backend="pytorch", **FIELDS).start_step == 2
    told = capfd.readouterr().out
    assert message in told and "it is .bad_step_000004 now" in told


def test_whole_checkpoint_of_an_earlier_version_is_gone_on_from_with_a_note(rows, run_dir, capfd):
    as_of_format_2(run_dir / "checkpoints" / "step_000004")
    assert build(rows, run_dir, ALONE, backend="pytorch", **FIELDS).start_step == 4
    note = "note: step_000004 is of an earlier version, which kept no checksum of state.json"
    assert capfd.readouterr().out.count(note) == 1


@pytest.mark.parametrize(("steps", "is_over"), [(4, True), (6, False)])
def test_run_that_has_all_its_steps_says_so_when_it_is_started_again(rows, run_dir, steps, is_over, capfd):
    log_plan(build(rows, run_dir, ALONE, backend="pytorch", **{**FIELDS, "steps": steps}))
    told = capfd.readouterr().out
    assert "resuming after step 4" in told
    assert ("step 4, the last: nothing is left to train; more train.steps or train.epochs goes on\n" in told) is is_over


def test_checkpoint_with_its_checksum_is_gone_on_from_without_a_note(rows, run_dir, capfd):
    assert build(rows, run_dir, ALONE, backend="pytorch", **FIELDS).start_step == 4
    assert "earlier version" not in capfd.readouterr().out


def test_renamed_checkpoint_is_not_taken_for_one_of_another_step(rows, run_dir, capfd):
    (run_dir / "checkpoints" / "step_000004").rename(run_dir / "checkpoints" / "step_000006")
    assert build(rows, run_dir, ALONE, backend="pytorch", **FIELDS).start_step == 2
    assert "step_000006: state.json is of step 4, not of the step in the folder's name" in capfd.readouterr().out


def test_checkpoint_under_a_name_without_a_step_may_be_named(rows, run_dir, tmp_path):
    path = shutil.copytree(run_dir / "checkpoints" / "step_000004", tmp_path / "the best")
    assert build(rows, tmp_path / "new", ALONE, backend="pytorch", resume=str(path), **FIELDS).start_step == 4


def test_8_bit_state_is_not_taken_for_a_damaged_one_of_adamw():
    now = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
    with pytest.raises(ConfigError, match="adamw8bit, which adamw cannot take over"):
        check_optimizer(Path("step_000002"), {"optim": {"optimizer": "adamw8bit"}}, now)


def test_start_behind_saved_checkpoints_says_that_its_saves_delete_them(rows, run_dir, capfd):
    build(rows, run_dir, ALONE, backend="pytorch", **{**FIELDS, "resume": "never"})
    assert "holds checkpoints of later steps (2, 4) than this start begins from (0)" in capfd.readouterr().out


def test_named_checkpoint_that_is_damaged_is_an_error(rows, run_dir, tmp_path):
    path = run_dir / "checkpoints" / "step_000004"
    truncate(path / "__0_0.distcp")
    with pytest.raises(CheckpointError, match=r"cannot load .*step_000004: __0_0.distcp has 100 bytes"):
        build(rows, tmp_path / "new", ALONE, backend="pytorch", resume=str(path), **FIELDS)
    assert path.exists()


def test_named_folder_that_is_no_checkpoint_says_what_it_lacks_and_offers_the_newest(rows, run_dir, tmp_path):
    with pytest.raises(ConfigError, match=r"it has no COMPLETE and no .metadata file\n.*did you mean .*step_000004"):
        build(rows, tmp_path / "new", ALONE, backend="pytorch", resume=str(run_dir), **FIELDS)


@pytest.mark.parametrize(
    ("section", "changes", "message"),
    [
        ("model", {"num_layers": 3}, "another model: num_layers 2 -> 3"),
        ("model", {"hidden_size": 64}, "another model: hidden_size 32 -> 64"),
        ("model", {"family": "llama"}, "another model: family qwen3 -> llama"),
        ("data", {"tokenizer": "with more ids"}, "another model: vocab_size 260 -> 262"),
        ("lora", {"rank": 4}, "a run that trains something else: .*lora.rank none -> 4"),
    ],
)
def test_checkpoint_of_another_model_is_refused_with_both_values(rows, run_dir, section, changes, message, tmp_path):
    config = config_to_dict(training_on(rows, backend="pytorch", **FIELDS))
    config[section] |= changes
    if section == "data":
        tokenizer = build_bytes_tokenizer()
        tokenizer.add_tokens(["one more", "and one"])
        tokenizer.save_pretrained(tmp_path / "tokenizer")
        config["data"]["tokenizer"] = str(tmp_path / "tokenizer")
    with pytest.raises(ModelError, match=message):
        build_of(config_from_dict(config), run_dir)


def test_checkpoint_of_another_tokenizer_is_refused_with_both_hashes(rows, tmp_path):
    config = training_on(rows, backend="pytorch", stop_after_steps=2, **FIELDS)
    run = build_of(config, tmp_path, recipe=CausalLM(build_data, lambda _: "aaaa"))
    loop.train(run)
    run.log.close()
    with pytest.raises(ModelError, match="made with another tokenizer: aaaa -> bbbb"):
        build_of(config, tmp_path, recipe=CausalLM(build_data, lambda _: "bbbb"))


def test_learning_rate_of_another_length_is_the_scaled_one(rows, tmp_path, capsys):
    optim = {"learning_rate": 1.0, "warmup_steps": 0, "schedule": "linear", "lr_scaling": "linear"}
    for steps in (4, 8):
        config = config_to_dict(
            training_on(rows, backend="pytorch", **{**FIELDS, "steps": steps, "stop_after_steps": 2})
        )
        config["optim"] |= {**optim, "base_batch_size": 3}
        run = build_of(config_from_dict(config), tmp_path)
        assert run.data.train.global_batch_size == 6
        loop.train(run)
        run.log.close()
    assert "learning rate of step 3 is 1.5, not 1\n" in capsys.readouterr().out


def test_longer_and_shorter_run_say_what_becomes_of_the_learning_rate():
    config = config_from_dict({"optim": {"learning_rate": 1.0, "warmup_steps": 0, "schedule": "linear"}})
    assert config.optim == OptimConfig(learning_rate=1.0, warmup_steps=0, schedule="linear")
    assert render_horizon(config, step=5, before=10, now=20, peak=1.0) == (
        "the run had 10 steps and has 20: the schedule is that of 20 steps from here on, "
        "so the learning rate of step 6 is 0.75, not 0.5"
    )
    assert render_horizon(config, step=5, before=20, now=20, peak=1.0) is None
    assert render_horizon(config, step=5, before=None, now=20, peak=1.0) is None


def test_run_resumed_with_more_steps_has_the_rates_of_a_run_of_that_length(rows, run_dir, tmp_path, capfd):
    assert resume(ALONE, rows, [str(run_dir)], {"backend": "pytorch", "steps": 12}) == 4
    assert "the run had 8 steps and has 12: the schedule is that of 12 steps" in capfd.readouterr().out
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    whole = train(1, rows, tmp_path / "whole", steps=12, backend="pytorch", **FIELDS)
    rates = [record["lr"] for record in records if "loss" in record]
    assert rates[4:] == [record["lr"] for record in whole if "loss" in record][4:]


HYBRID = {"sharding_strategy": "HYBRID_SHARD", "dp_replicate": 2}
WORLDS = [(2, {}), (4, HYBRID), (3, {}), (1, {})]
"""Ranks and parallel settings of one start after another. An adapter's A has three rows: less than four ranks."""


def go_on(dist: Dist, rows: str, run_dir: str, parallel: dict, lora: dict, steps: int) -> int:
    """One start that takes so many steps; the step that it began at."""
    Path(run_dir).mkdir(exist_ok=True)
    backend = "pytorch" if dist.world_size == 1 else "fsdp"
    tree = config_to_dict(training_on(rows, backend=backend, stop_after_steps=steps, **FIELDS))
    tree["parallel"] |= parallel
    tree["lora"] |= lora
    tree["target"]["gpu_ranks"] = list(range(dist.world_size))
    run = build_of(config_from_dict(tree), Path(run_dir), dist)
    loop.train(run)
    run.log.close()
    return run.start_step


@pytest.mark.parametrize("lora", [{}, {"rank": 3, "base_dtype": "fp32"}], ids=["whole model", "adapters"])
def test_run_goes_on_at_other_numbers_of_ranks_and_replicas_with_the_same_losses(rows, tmp_path, lora):
    for run_dir, worlds, steps in ((tmp_path / "a", WORLDS, 2), (tmp_path / "b", [(1, {})], 8)):
        starts = [run_ranks(go_on, n, rows, str(run_dir), parallel, lora, steps)[0] for n, parallel in worlds]
        assert starts == [steps * number for number in range(len(worlds))]
    there, whole = (
        losses([json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()])
        for name in "ab"
    )
    assert len(there) == 8
    assert there == pytest.approx(whole, abs=1e-5)
