"""The keys of `parallel` beside each other: understood, noted or refused, and never ignored."""

from __future__ import annotations

from typing import Any

import pytest

from trainer.config.load import ConfigError, check_config, config_from_dict, config_notes
from trainer.config.parallel import sharding
from trainer.schema import Config, ParallelConfig, TargetConfig


def config(n: int = 4, **parallel: Any) -> Config:
    return Config(
        target=TargetConfig(gpu_ranks=list(range(n)), train_backend="fsdp"), parallel=ParallelConfig(**parallel)
    )


@pytest.mark.parametrize("word", ["_HYBRID_SHARD_ZERO2", "HYBRID_SHARD_ZERO2", "hybrid_shard_zero2"])
def test_a_strategy_is_understood_in_any_case_and_without_underscore(word):
    read = config_from_dict(
        {"target": {"gpu_ranks": [0, 1]}, "parallel": {"sharding_strategy": word, "dp_replicate": 2}}
    )
    assert read.parallel.sharding_strategy == "_HYBRID_SHARD_ZERO2"


def test_a_misspelt_strategy_names_the_nearest():
    with pytest.raises(ConfigError) as caught:
        config_from_dict({"parallel": {"sharding_strategy": "FULL_SHARDS"}})
    assert caught.value.message.startswith("parallel.sharding_strategy is 'FULL_SHARDS', expected one of FULL_SHARD,")
    assert caught.value.message.endswith("or null")
    assert caught.value.hint == "did you mean FULL_SHARD?"


@pytest.mark.parametrize(
    ("options", "reshard"),
    [
        ({}, True),
        ({"reshard_after_forward": False}, False),
        ({"sharding_strategy": "SHARD_GRAD_OP"}, False),
        ({"sharding_strategy": "HYBRID_SHARD"}, True),
        ({"sharding_strategy": "_HYBRID_SHARD_ZERO2"}, False),
        ({"sharding_strategy": "FULL_SHARD", "reshard_after_forward": 2}, 2),
    ],
)
def test_strategy_and_reshard_mean_one_thing(options, reshard):
    assert sharding(ParallelConfig(**options)).reshard is reshard


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"sharding_strategy": "FULL_SHARD", "reshard_after_forward": False},
            "parallel.sharding_strategy is FULL_SHARD, but parallel.reshard_after_forward is false: FULL_SHARD frees",
        ),
        (
            {"sharding_strategy": "SHARD_GRAD_OP", "reshard_after_forward": True},
            "parallel.sharding_strategy is SHARD_GRAD_OP, but parallel.reshard_after_forward is true: SHARD_GRAD",
        ),
        (
            {"sharding_strategy": "NO_SHARD", "reshard_after_forward": True},
            "parallel.sharding_strategy is NO_SHARD, but parallel.reshard_after_forward is true: nothing is sharded",
        ),
        (
            {"sharding_strategy": "FULL_SHARD", "dp_replicate": 2},
            "parallel.dp_replicate is 2, but parallel.sharding_strategy is FULL_SHARD",
        ),
        (
            {"sharding_strategy": "HYBRID_SHARD"},
            "parallel.sharding_strategy is HYBRID_SHARD, and parallel.dp_replicate does not say how many replicas 4",
        ),
        (
            {"sharding_strategy": "HYBRID_SHARD", "dp_replicate": 3},
            "parallel.dp_replicate is 3, which does not divide 4 ranks",
        ),
        (
            {"reshard_after_forward": 3},
            "parallel.reshard_after_forward is 3, not a part of the 4 rank(s) that share the parameters",
        ),
        ({"wrap_policy": "classes"}, "parallel.wrap_policy is classes, but parallel.wrap_classes is empty"),
        ({"dp_replicate": 0}, "parallel.dp_replicate is 0, must be 1 or more"),
        ({"checkpoint_every": 0}, "parallel.checkpoint_every is 0, must be 1 or more"),
        ({"forward_prefetch": -1}, "parallel.forward_prefetch is -1, must be 0 or more"),
        ({"activation_budget": 1.5}, "parallel.activation_budget is 1.5, must be 0 to 1"),
        (
            {"activation_checkpointing": "budget", "compile": False},
            "parallel.activation_checkpointing is budget, which the compiler keeps to, but parallel.compile is false",
        ),
    ],
    ids=lambda value: ",".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_what_cannot_be_honoured_is_refused(options, message):
    with pytest.raises(ConfigError) as caught:
        check_config(config(**options))
    assert caught.value.message.startswith(message)


@pytest.mark.parametrize(
    ("options", "backend", "note"),
    [
        ({"min_num_params": 1}, "fsdp", "parallel.min_num_params: no effect, parallel.wrap_policy is transformer"),
        ({"wrap_classes": ["MLP"]}, "fsdp", "parallel.wrap_classes: no effect, parallel.wrap_policy is transformer"),
        ({"checkpoint_every": 2}, "fsdp", "parallel.checkpoint_every: no effect, parallel.activation_checkpointing is"),
        (
            {"activation_budget": 0.7},
            "fsdp",
            "parallel.activation_budget: no effect, parallel.activation_checkpointing",
        ),
        ({"sync_module_states": True}, "fsdp", "parallel.sync_module_states: no effect, random weights follow from"),
        ({"sharding_strategy": "SHARD_GRAD_OP"}, "ddp", "parallel.sharding_strategy: no effect with ddp"),
        ({"cpu_offload": True, "wrap_policy": "size"}, "ddp", "parallel.wrap_policy, parallel.cpu_offload: no effect"),
        ({"ignored_modules": ["x"]}, "pytorch", "parallel.ignored_modules: no effect with pytorch"),
    ],
)
def test_what_has_no_effect_is_said(options, backend, note):
    notes = [line for line in config_notes(config(**options), backend=backend, deployed=True) if "parallel." in line]
    assert len(notes) == 1
    assert notes[0].startswith(note)


def test_memory_has_no_effect_on_the_cpu():
    cpu = Config(target=TargetConfig(device="cpu"), parallel=ParallelConfig(memory="manual"))
    (note,) = (line for line in config_notes(cpu, backend="pytorch", deployed=True) if "parallel." in line)
    assert note == "parallel.memory: no effect on the CPU: it is about a GPU's memory"


def test_no_shard_in_force_is_nothing_to_note():
    assert config_notes(config(sharding_strategy="NO_SHARD"), backend="ddp", deployed=True) == []
