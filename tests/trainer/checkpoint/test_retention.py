"""Which checkpoints stay, as a pure function of what was saved."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.saves import start
from tests.support.tiny import ALONE
from tests.support.trainings import train
from trainer.checkpoint.folders import steps_in
from trainer.checkpoint.retention import Keep, to_delete
from trainer.config.load import config_notes
from trainer.config.rules import check_config
from trainer.errors import ConfigError
from trainer.saver.writer import Writer
from trainer.schema import Config, DataConfig, TrainConfig

LOSSES = {10: 3.0, 20: 1.0, 30: None, 40: 2.0, 50: 4.0}


@pytest.mark.parametrize(
    ("keep", "stays"),
    [
        (Keep(last=1), [50]),
        (Keep(last=2), [40, 50]),
        (Keep(last=0, best=1, every=20), [10, 20, 30, 40, 50]),
        (Keep(last=1, best=2), [20, 40, 50]),
        (Keep(last=1, best=9), [10, 20, 40, 50]),
        (Keep(last=1, every=15), [30, 50]),
        (Keep(last=1, best=1, every=10), [10, 20, 30, 40, 50]),
    ],
)
def test_last_best_and_every_so_manieth_stay(keep, stays):
    assert sorted(set(LOSSES) - set(to_delete(LOSSES, keep, newest=50))) == stays


def test_of_equal_losses_the_later_is_the_better_and_nan_is_none():
    saved = {1: 2.0, 2: 2.0, 3: float("nan"), 4: 5.0}
    assert to_delete(saved, Keep(last=1, best=1), newest=4) == [1, 3]


def test_old_checkpoint_that_cannot_be_deleted_is_told_and_the_new_one_is_complete(tmp_path):
    def occupy(point: str) -> None:
        if point == "committed":  # the name that a checkpoint takes to be deleted
            (tmp_path / ".tmp_step_000001_removed" / "taken").mkdir(parents=True, exist_ok=True)

    model, optimizer = start(ALONE)
    writer = Writer(ALONE, beside=None, on_stage=occupy)
    for number in (1, 2):
        writer.start(tmp_path, number, model, optimizer, {}, keep=Keep(last=1))
        written = writer.result()
    writer.close()
    assert list(steps_in(tmp_path)) == [1, 2]
    assert written.note.startswith(f"older checkpoints in {tmp_path} were not deleted: OSError: ")


KEEPS = st.builds(Keep, st.integers(0, 4), st.integers(0, 4), st.integers(0, 7))
SAVED = st.dictionaries(st.integers(1, 60), st.none() | st.floats(), max_size=20)


@given(saved=SAVED, keep=KEEPS, newest=st.integers(1, 60))
def test_newest_stays_and_so_does_all_that_any_rule_wants(saved, keep, newest):
    saved = {**saved, newest: saved.get(newest)}
    gone = set(to_delete(saved, keep, newest=newest))
    own = sorted(step for step in saved if step <= newest)
    assert gone <= set(saved)
    assert newest not in gone
    assert {step for step in saved if step > newest} <= gone
    assert not gone & set(own[-keep.last :] if keep.last else own)
    assert not keep.every or not any(step % keep.every == 0 for step in gone & set(own))
    assert len(set(own) - gone) >= min(len(own), max(keep.last, 1))


def test_writer_keeps_the_best_by_the_loss_in_its_checkpoints(tmp_path: Path):
    model, optimizer = start(ALONE)
    writer = Writer(ALONE, beside=None)
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 2.5)):
        writer.start(tmp_path, step, model, optimizer, {"eval_loss": loss}, keep=Keep(last=1, best=1))
        writer.result()
    writer.close()
    assert list(steps_in(tmp_path)) == [2, 4]


@pytest.mark.parametrize(
    ("train", "data", "message"),
    [
        ({"save_every": 100, "eval_every": 30}, {}, "not every save, each 100 steps, has an evaluation"),
        ({"save_every": 100, "eval_every": 0}, {}, "not every save, each 100 steps, has an evaluation"),
        ({"save_every": 100, "eval_every": 50}, {"eval_fraction": 0.0}, "there is no held-out data"),
    ],
)
def test_best_checkpoints_need_an_evaluation_at_every_save(train, data, message):
    with pytest.raises(ConfigError, match=message):
        check_config(Config(train=TrainConfig(keep_best=2, **train), data=DataConfig(**data)))


@pytest.mark.parametrize(
    ("train", "note"),
    [
        (TrainConfig(keep_last=0, keep_every=5), "train.keep_every: no effect, train.keep_last=0 keeps every"),
        (TrainConfig(save_every=0, async_save=False), "train.async_save: no effect, train.save_every=0 saves only"),
    ],
)
def test_retention_without_effect_is_said(train, note):
    assert any(note in line for line in config_notes(Config(train=train), backend="fsdp", deployed=True))


def test_run_keeps_its_last_its_best_and_every_fourth_checkpoint(rows, tmp_path):
    fields = {"save_every": 2, "eval_every": 2, "keep_last": 1, "keep_best": 1, "keep_every": 4}
    records = train(1, rows, tmp_path / "run", steps=14, micro_batch_size=6, **fields)
    losses = {record["step"]: record["eval_loss"] for record in records if record.get("eval_loss") and record["step"]}
    best = min(losses, key=lambda step: (losses[step], -step))
    assert set(steps_in(tmp_path / "run" / "checkpoints")) == {4, 8, 12, 14, best}
