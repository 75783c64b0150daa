"""The rules and notes of the keys that say how a run is watched."""

from __future__ import annotations

from typing import Any

import pytest

from trainer.config.load import check_config, config_notes
from trainer.errors import ConfigError
from trainer.schema import Config, DataConfig, RunConfig, TargetConfig, TrainConfig


def train(**fields: Any) -> Config:
    return Config(train=TrainConfig(**fields))


@pytest.mark.parametrize(
    ("config", "error"),
    [
        (train(early_stop_patience=0), "train.early_stop_patience is 0, must be 1 or more"),
        (train(hang_timeout_s=-1.0), "train.hang_timeout_s is -1.0, must be 0 or more"),
        (train(profile_steps=[0, 3]), "train.profile_steps holds 0, must be 1 or more"),
        (train(profile_steps=[3, 201]), "train.profile_steps holds 201, more than train.steps, 200"),
        (train(memory_snapshot_steps=[201]), "train.memory_snapshot_steps holds 201, more than train.steps, 200"),
        (
            train(early_stop_patience=2, eval_every=0),
            "train.early_stop_patience is 2, but train.eval_every is 0: nothing is evaluated",
        ),
        (
            Config(train=TrainConfig(early_stop_patience=2), data=DataConfig(eval_fraction=0.0)),
            "train.early_stop_patience is 2, but there is no held-out data to judge by",
        ),
    ],
)
def test_broken_rule_is_named_with_its_numbers(config: Config, error: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_config(config)
    assert caught.value.message == error


@pytest.mark.parametrize(
    ("config", "note"),
    [
        (
            train(early_stop_min_delta=0.1),
            "train.early_stop_min_delta: no effect without train.early_stop_patience",
        ),
        (
            Config(run=RunConfig(tracker_project="mine")),
            "run.tracker_project: no effect, wandb is none of run.trackers",
        ),
        (
            Config(train=TrainConfig(memory_snapshot_steps=[3]), target=TargetConfig(device="cpu")),
            "train.memory_snapshot_steps: no effect on the CPU: it shows a GPU's allocations",
        ),
        (
            Config(
                data=DataConfig(eval_fraction=0.0, max_eval_rows=5), train=TrainConfig(eval_every=7, eval_batches=2)
            ),
            "data.max_eval_rows, train.eval_every, train.eval_batches: no effect, there is no held-out data "
            "(data.eval, data.eval_fraction)",
        ),
    ],
)
def test_key_without_effect_is_noted(config: Config, note: str) -> None:
    assert config_notes(config, backend="fsdp", deployed=True) == [note]
