"""accelerate's config files, written by accelerate itself, become this schema's keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from deployer.cli import cli
from deployer.errors import UsageError
from trainer.config.accelerate import read_fsdp_config
from trainer.config.keys import get_key
from trainer.config.load import Config, ConfigError, load_config

FSDP1 = {
    "fsdp_version": 1,
    "fsdp_reshard_after_forward": "SHARD_GRAD_OP",  # where `accelerate config` writes the strategy
    "fsdp_offload_params": True,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_transformer_layer_cls_to_wrap": "Qwen3DecoderLayer,Qwen3MLP",
    "fsdp_backward_prefetch": "BACKWARD_PRE",
    "fsdp_state_dict_type": "FULL_STATE_DICT",
    "fsdp_forward_prefetch": True,
    "fsdp_use_orig_params": False,
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_sync_module_states": True,
    "fsdp_activation_checkpointing": True,
}
FSDP2 = {
    "fsdp_version": 2,
    "fsdp_reshard_after_forward": False,
    "fsdp_offload_params": False,
    "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP",
    "fsdp_min_num_params": 2000,
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_activation_checkpointing": False,
}


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "sft.yaml"
    path.write_text("target: {gpu_ranks: [0, 1], device: cpu}\ntrain: {precision: fp32}\n")
    return path


def written_by_accelerate(path: Path, fsdp: dict[str, Any], **changes: Any) -> Path:
    from accelerate.commands.config.config_args import ClusterConfig

    fields: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "mixed_precision": "bf16",
        "use_cpu": False,
        "debug": False,
        "num_processes": 2,
        "fsdp_config": dict(fsdp),
    }
    ClusterConfig(**(fields | changes)).to_yaml_file(path)
    return path


def test_a_file_of_version_1_is_understood_whole(tmp_path, config_file):
    notes: list[str] = []
    file = written_by_accelerate(tmp_path / "a.yaml", FSDP1)
    config = load_config(config_file, fsdp_config=file, tell=notes.append)
    expected = {
        "target.train_backend": "fsdp",
        "train.precision": "bf16",
        "parallel.sharding_strategy": "SHARD_GRAD_OP",
        "parallel.cpu_offload": True,
        "parallel.wrap_policy": "classes",
        "parallel.wrap_classes": ["Qwen3DecoderLayer", "Qwen3MLP"],
        "parallel.forward_prefetch": True,
        "parallel.sync_module_states": True,
        "parallel.activation_checkpointing": "full",
    }
    assert {key: get_key(config, key) for key in expected} == expected
    assert [note.partition(":")[0] for note in notes if note.startswith("parallel.")] == [
        "parallel.backward_prefetch",
        "parallel.state_dict_type",
        "parallel.use_orig_params",
    ]


def test_a_file_of_version_2_is_understood_whole(tmp_path, config_file):
    config = load_config(config_file, fsdp_config=written_by_accelerate(tmp_path / "a.yaml", FSDP2))
    parallel = config.parallel
    assert (parallel.reshard_after_forward, parallel.sharding_strategy) == (False, None)
    assert (parallel.wrap_policy, parallel.min_num_params) == ("size", 2000)
    assert (parallel.cpu_offload, parallel.activation_checkpointing) == (False, "none")


def test_the_file_goes_before_the_config_and_after_the_overrides(tmp_path, config_file):
    path = written_by_accelerate(tmp_path / "a.yaml", FSDP2)
    assert load_config(config_file, fsdp_config=path).train.precision == "bf16"
    config = load_config(config_file, ["train.precision=fp32", "parallel.cpu_offload=true"], fsdp_config=path)
    assert (config.train.precision, config.parallel.cpu_offload) == ("fp32", True)


def test_what_has_no_effect_is_told(tmp_path, config_file):
    notes: list[str] = []
    load_config(config_file, fsdp_config=written_by_accelerate(tmp_path / "a.yaml", FSDP1), tell=notes.append)
    assert [note.removeprefix(f"{tmp_path / 'a.yaml'}: ") for note in notes[:3]] == [
        "fsdp_cpu_ram_efficient_loading: no effect, every rank reads only its own share of the weights",
        "fsdp_version: 1, and FSDP2 runs it: the options mean what docs/config.md says",
        "debug, enable_cpu_affinity, main_training_function, rdzv_backend, same_network: no effect here,"
        " target and the launcher decide that",
    ]


@pytest.mark.parametrize("line", ["fsdp_sharding_strategy: 4", "fsdp_sharding_strategy: HYBRID_SHARD"])
def test_a_strategy_is_a_name_or_the_old_number_and_may_stand_at_the_top(line, tmp_path):
    (tmp_path / "a.yaml").write_text(f"{line}\n")
    (setting,) = read_fsdp_config(tmp_path / "a.yaml").settings
    assert (setting.key, setting.value) == ("parallel.sharding_strategy", "HYBRID_SHARD")


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        (
            "fsdp_config:\n  fsdp_ofload_params: true\n",
            "fsdp_ofload_params is not a key of accelerate's config",
            "did you mean fsdp_offload_params?",
        ),
        (
            "debug: false\nmixed_precision: fp16\n",
            "mixed_precision is 'fp16': bf16 and no (fp32)",
            "bf16 has the range",
        ),
        ("debug: false\ndistributed_type: DEEPSPEED\n", "distributed_type is 'DEEPSPEED': only FSDP", ""),
        ("debug: false\nnum_machines: 2\n", "num_machines is 2: one host is trained on", ""),
        ("debug: false\nmachine_rank: 1\n", "machine_rank is 1: one host is trained on", ""),
        (
            "debug: false\nnum_processes: 4\n",
            "num_processes is 4, but target.gpu_ranks makes 2 processes",
            "set target.gpu_ranks=0,1,2,3, or change num_processes",
        ),
        ("fsdp_config:\n  fsdp_auto_wrap_policy: NO_WRAP\n", "fsdp_auto_wrap_policy is 'NO_WRAP': the whole model", ""),
        (
            "fsdp_config:\n  fsdp_sharding_strategy: FULL_SHART\n",
            "fsdp_sharding_strategy is 'FULL_SHART': expected one of FULL_SHARD",
            "did you mean FULL_SHARD?",
        ),
        ("fsdp_config:\n  fsdp_backward_prefetch: BACKWARD_POST\n", "parallel.backward_prefetch is BACKWARD_POST", ""),
        ("fsdp_config:\n  fsdp_backward_prefetch: null\n", "parallel.backward_prefetch is NONE", ""),
        ("fsdp_config:\n  fsdp_limit_all_gathers: false\n", "parallel.limit_all_gathers is false", ""),
        ("fsdp_config:\n  fsdp_state_dict_type: LOCAL_STATE_DICT\n", "parallel.state_dict_type is LOCAL_STATE", ""),
        ("fsdp_config:\n  fsdp_ignored_modules: '.*(a|b)'\n", "fsdp_ignored_modules is '.*(a|b)': a regular", ""),
        ("debug: false\ndeepspeed_config: {zero_stage: 3}\n", "deepspeed_config is a mapping: this trainer has", ""),
        ("dynamo_config:\n  dynamo_backend: EAGER\n", "dynamo_backend is 'EAGER': only NO and INDUCTOR", ""),
    ],
    ids=lambda value: value.split("\n")[1].strip() if "\n" in value else "",
)
def test_what_cannot_be_done_is_refused_with_its_line(text, message, hint, tmp_path, config_file):
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(config_file, fsdp_config=path)
    assert caught.value.message.startswith(message)
    assert caught.value.where == f"{path}:2"
    assert hint in caught.value.hint


def test_other_backends_precision_and_compile_are_mapped(tmp_path, config_file):
    dynamo = {"dynamo_backend": "INDUCTOR", "dynamo_mode": "default", "dynamo_use_dynamic": False}
    changes = {"distributed_type": "MULTI_GPU", "mixed_precision": "no", "gpu_ids": "2,3", "dynamo_config": dynamo}
    config: Config = load_config(config_file, fsdp_config=written_by_accelerate(tmp_path / "a.yaml", {}, **changes))
    assert (config.target.train_backend, config.target.gpu_ranks) == ("ddp", [2, 3])
    assert (config.train.precision, config.parallel.compile) == ("fp32", True)


def test_deploy_ships_what_the_file_says_and_counts_the_gpus_of_its_command_line(tmp_path, config_file, monkeypatch):
    path = written_by_accelerate(tmp_path / "a.yaml", FSDP2, num_processes=4)
    words = [str(config_file), "parallel.use_orig_params=true", "--fsdp-config", str(path), "--gpus", "0,1,2,3"]
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli, [*words, "--dry-run", "--json"])
    assert done.exit_code == 0, done.output
    assert "note: parallel.use_orig_params: no effect, FSDP2 has no flat parameter" in done.stderr
    assert f"note: {path}: fsdp_cpu_ram_efficient_loading: no effect" in done.stderr
    assert "min_num_params: 2000" in done.stdout
    assert "use_orig_params" not in done.stdout


def test_deploy_of_a_program_takes_no_fsdp_config(tmp_path):
    done = CliRunner().invoke(cli, ["run", "--fsdp-config", "a.yaml", "--", "python", "a.py"])
    assert isinstance(done.exception, UsageError)
    assert "--fsdp-config goes with a config" in str(done.exception)


def test_number_of_processes_beside_a_single_one_is_noted(tmp_path: Path) -> None:
    """As TRL's single_gpu.yaml has it."""
    (tmp_path / "single.yaml").write_text("distributed_type: 'NO'\nnum_processes: 8\n")
    accelerate = read_fsdp_config(tmp_path / "single.yaml")
    assert accelerate.num_processes is None
    assert "num_processes: no effect, distributed_type NO is one process" in accelerate.notes[0]


def test_json_of_accelerate_says_what_its_yaml_does(tmp_path: Path) -> None:
    from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file

    yaml = written_by_accelerate(tmp_path / "a.yaml", FSDP1)
    fields = vars(load_config_from_file(str(yaml)))
    ClusterConfig(**fields).to_json_file(tmp_path / "a.json")
    (tmp_path / "b.json").write_text((tmp_path / "a.json").read_text().replace("  ", "\t"))

    def settings(path: Path) -> dict[str, str]:
        return {setting.key: str(setting.value) for setting in read_fsdp_config(path).settings}

    expected = settings(yaml)
    assert len(expected) > 10
    assert settings(tmp_path / "a.json") == settings(tmp_path / "b.json") == expected
    assert load_config_from_file(str(tmp_path / "b.json")).mixed_precision == "bf16"


@pytest.mark.parametrize("word", ["bf16", "BF16", "'Bf16'", "no", "NO", "'no'", "false", "null"])
def test_precision_is_read_as_accelerate_reads_it(tmp_path: Path, word: str) -> None:
    """In any case of letters; YAML makes false of `no`, and accelerate takes it as no."""
    import yaml
    from accelerate.utils import PrecisionType

    (tmp_path / "a.yaml").write_text(f"debug: false\nmixed_precision: {word}\n")
    value = yaml.safe_load(word)
    theirs = PrecisionType(str(value or "no").lower())
    ours = {setting.key: setting.value for setting in read_fsdp_config(tmp_path / "a.yaml").settings}
    assert ours.get("train.precision", "fp32") == {"bf16": "bf16", "no": "fp32"}[str(theirs)]


@pytest.mark.parametrize("word", ["true", "'true'", "True", "yes", "1", "'1'", "y", "on", "false", "0", "'n'", "off"])
def test_truth_values_are_read_as_accelerate_reads_them(tmp_path: Path, word: str) -> None:
    import yaml
    from accelerate.utils import str_to_bool

    (tmp_path / "a.yaml").write_text(f"fsdp_config:\n  fsdp_offload_params: {word}\n")
    ours = {setting.key: setting.value for setting in read_fsdp_config(tmp_path / "a.yaml").settings}
    assert ours == {"parallel.cpu_offload": bool(str_to_bool(str(yaml.safe_load(word)).lower()))}


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("fsdp_min_num_params: 1efoo", "fsdp_min_num_params is '1efoo': expected a whole number"),
        ("fsdp_min_num_params: 1e999", "fsdp_min_num_params is 1e999: expected a whole number"),
        ("fsdp_min_num_params: {a: 1}", "fsdp_min_num_params is a mapping: expected a whole number"),
        ("fsdp_offload_params: [1]", "fsdp_offload_params is [1]: expected true or false"),
        ("fsdp_version: '3'", "fsdp_version is '3': expected 1 or 2"),
        ("fp16: true", "fp16 is true: bf16 and no (fp32) can be done here"),
        ("num_processes: many", "num_processes is 'many': expected a whole number"),
    ],
)
def test_value_that_cannot_be_is_told_with_its_key_and_line(tmp_path: Path, line: str, told: str) -> None:
    (tmp_path / "a.yaml").write_text(f"debug: false\n{line}\n")
    with pytest.raises(ConfigError) as caught:
        read_fsdp_config(tmp_path / "a.yaml")
    assert (caught.value.message, caught.value.where) == (told, f"{tmp_path / 'a.yaml'}:2")


@pytest.mark.parametrize(
    "line", ["fsdp_min_num_params: 1e8", "fsdp_min_num_params: '100000000'", "distributed_type: NO"]
)
def test_number_and_word_as_people_write_them(tmp_path: Path, line: str) -> None:
    (tmp_path / "a.yaml").write_text(f"debug: false\n{line}\n")
    [setting] = read_fsdp_config(tmp_path / "a.yaml").settings
    assert setting.value in (10**8, "pytorch")
