"""What train.precision=auto becomes: by the CPU's flags and a timed product, by all ranks, by the checkpoint."""

from __future__ import annotations

import json

import pytest
import torch

from tests.support.ranks import run_ranks
from tests.support.tiny import ALONE
from tests.support.trainings import train, training_on
from trainer.config.load import config_from_dict, config_to_dict
from trainer.errors import ConfigError
from trainer.inspection.inspect_run import inspect_run
from trainer.parallel.float8_choice import decide_float8, why_no_float8
from trainer.train import precision
from trainer.train.resolve_defaults import saved_config

X86 = (
    "processor\t: 0\nvendor_id\t: GenuineIntel\nflags\t\t: fpu avx2 avx512_bf16 amx_bf16\nbugs\t\t:\n\nprocessor\t: 1\n"
)
ARM = "processor\t: 0\nFeatures\t: fp asimd bf16 i8mm\n"
HAS_BF16 = precision.why_no_bf16(torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("cpuinfo", "flags"), [(X86, {"fpu", "avx2", "avx512_bf16", "amx_bf16"}), (ARM, {"fp", "asimd", "bf16", "i8mm"})]
)
def test_flags_of_a_cpu_are_those_of_its_first_processor(cpuinfo, flags):
    assert precision.parse_flags(cpuinfo) == flags


def test_cpu_without_the_flags_has_no_bf16_and_nothing_is_timed():
    assert (
        precision.why_no_bf16_on_cpu(frozenset({"avx2", "avx512f"}), pytest.fail) == "this CPU has no bf16 in hardware"
    )


def test_cpu_whose_flags_are_not_known_is_not_called_one_without():
    assert precision.why_no_bf16_on_cpu(frozenset(), pytest.fail) == "this CPU is not known to have bf16 in hardware"


@pytest.mark.parametrize("flag", ["avx512_bf16", "amx_bf16", "bf16"])
def test_cpu_with_the_flags_has_bf16_unless_its_product_is_slow(flag):
    assert precision.why_no_bf16_on_cpu(frozenset({flag}), lambda: 1.4) is None
    slow = precision.why_no_bf16_on_cpu(frozenset({flag}), lambda: 46.2)
    assert slow == "bf16 products take 46 x as long as fp32 here, though this CPU has bf16 in hardware"


def test_product_is_slow_where_the_flags_are_lacking():
    ratio = precision.bf16_ratio()
    assert ratio > precision.SLOW or precision.cpu_flags() & precision.CPU_FLAGS


def lack_of_one(dist) -> str | None:
    return precision.first_reason("rank 1 has none" if dist.rank == 1 else None, dist)


def test_one_rank_without_bf16_decides_for_all():
    assert run_ranks(lack_of_one, 2) == ["rank 1 has none"] * 2


@pytest.mark.parametrize("named", ["bf16", "fp32"])
def test_precision_that_the_config_names_is_taken_and_told_only_where_it_is_slow(tmp_path, named):
    config = training_on("rows.jsonl", precision=named)
    resolved = precision.resolve_precision(config, ALONE)
    assert resolved.config == config
    assert [line[:38] for line in resolved.lines] == (
        ["warning: train.precision is bf16, and "] if named == "bf16" and not HAS_BF16 else []
    )


def test_run_takes_what_the_cpu_has_says_so_and_keeps_its_checkpoint_in_it(rows, tmp_path, capfd):
    fields = {"precision": "auto", "save_every": 2, "eval_every": 0}
    train(1, rows, tmp_path / "run", **fields, stop_after_steps=2)
    chosen = "bf16" if HAS_BF16 else "fp32"
    assert f"precision: {chosen}" in capfd.readouterr().out
    state = json.loads((tmp_path / "run" / "checkpoints" / "step_000002" / "state.json").read_text())
    assert state["config"]["train"]["precision"] == chosen


@pytest.mark.parametrize("saved", ["bf16", "fp32"])
def test_resumed_run_keeps_the_precision_of_its_checkpoint(rows, tmp_path, capfd, saved):
    fields = {"save_every": 2, "eval_every": 0}
    train(1, rows, tmp_path / "run", **fields, precision=saved, stop_after_steps=2)
    train(1, rows, tmp_path / "run", **fields, precision="auto", stop_after_steps=2)
    told = capfd.readouterr().out
    assert f"precision: {saved}, as the checkpoint has it" in told
    assert "changed since the checkpoint" not in told
    assert ("train.precision=fp32 changes it" in told) == (saved == "bf16" and not HAS_BF16)
    state = json.loads((tmp_path / "run" / "checkpoints" / "step_000004" / "state.json").read_text())
    assert state["config"]["train"]["precision"] == saved


def test_checkpoint_before_a_damaged_one_decides(rows, tmp_path):
    fields = {"save_every": 2, "eval_every": 0, "keep_last": 0, "precision": "bf16"}
    train(1, rows, tmp_path / "run", **fields, stop_after_steps=4)
    (tmp_path / "run" / "checkpoints" / "step_000004" / "state.json").write_text("{")
    config = training_on(rows, precision="auto")
    assert saved_config(config, tmp_path / "run", ALONE)["train"]["precision"] == "bf16"


def test_inspection_of_gpus_that_are_not_here_assumes_bf16(rows):
    fields = {"data": {"train": [rows], "seq_len": 96}}
    notes = inspect_run(config_from_dict({"target": {"gpu_ranks": [0]}, **fields}), samples=0).notes
    assert next(note for note in notes if "precision" in note).startswith("precision: bf16")


def test_float8_is_refused_where_products_turn_out_in_fp32():
    config = config_from_dict({"train": {"float8": "on"}})
    why_not = why_no_float8(precision.with_precision(config, "fp32"))
    assert why_not == "products are in fp32 (train.precision)"
    with pytest.raises(ConfigError, match="products are in fp32"):
        decide_float8("on", why_not=why_not, gain=lambda: 2.0)


@pytest.mark.parametrize("saved", [{}, {"train": None}, {"train": {}}, {"train": {"precision": ["bf16"]}}])
def test_checkpoint_whose_precision_is_no_name_decides_nothing(saved):
    assert precision.saved_precision(saved) is None


def test_config_that_auto_settles_is_still_one_that_the_rules_let_through():
    config = precision.with_precision(config_from_dict({"train": {"float8": "auto"}}), "fp32")
    assert config_from_dict(config_to_dict(config)) == config
