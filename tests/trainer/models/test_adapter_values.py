"""An adapter_config.json as other tools write it: read as PEFT reads it, and refused in a line where PEFT fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest

from tests.oracles.reference import hf_model
from tests.support.tiny import tiny_decoder, tiny_shape
from trainer.errors import ModelError
from trainer.models.adapter_files import load_adapter, read_spec
from trainer.models.lora import attach, linear_names

SHAPE = tiny_shape()
MISSING = "left out"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("adapter")
    settings = peft.LoraConfig(r=8, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    peft.get_peft_model(hf_model(SHAPE), settings).save_pretrained(path)
    return path


def with_values(folder: Path, values: dict[str, Any]) -> Path:
    file = folder / "adapter_config.json"
    whole = json.loads(file.read_text())
    kept = folder / "whole.json"
    whole = json.loads(kept.read_text()) if kept.exists() else whole
    kept.write_text(json.dumps(whole))
    said = {key: value for key, value in {**whole, **values}.items() if value is not MISSING}
    file.write_text(json.dumps(said))
    return folder


def scaling_of_peft(folder: Path) -> float:
    """Raises what PEFT raises."""
    model = peft.PeftModel.from_pretrained(hf_model(SHAPE), folder)
    return float(model.base_model.model.model.layers[0].self_attn.q_proj.scaling["default"])


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"lora_alpha": 16.5},
        {"lora_alpha": MISSING},
        {"r": MISSING},
        {"use_rslora": True},
        {"use_rslora": MISSING, "lora_dropout": MISSING, "bias": MISSING},
        {"target_modules": r".*\.(q|v)_proj"},
        {"fan_in_fan_out": True},
        {"init_lora_weights": None},
        {"init_lora_weights": "gaussian"},
        {"modules_to_save": [], "rank_pattern": {}, "alpha_pattern": {}},
        {"layers_to_transform": None, "layers_pattern": None, "a_key_of_tomorrow": None},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore")
def test_value_that_peft_takes_gives_its_scaling(folder: Path, values: dict[str, Any]) -> None:
    with_values(folder, values)
    model = tiny_decoder()
    spec = read_spec(folder, linear_names(model))
    attach(model, spec)
    load_adapter(model, folder)
    assert spec.scaling == pytest.approx(scaling_of_peft(folder))


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"lora_alpha": None}, "lora_alpha is None, not a number"),
        ({"lora_alpha": "16"}, "lora_alpha is '16', not a number"),
        ({"r": "8"}, "r is '8', not a whole number"),
        ({"r": None}, "r is None, not a whole number"),
        ({"r": 0}, "r is 0, not at least 1 and at most 1,048,576"),
        ({"r": [8]}, "r is [8], not a whole number"),
        ({"lora_dropout": "0.1"}, "lora_dropout is '0.1', not a number"),
        ({"lora_dropout": None}, "lora_dropout is None, not a number"),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore")
def test_value_that_peft_fails_at_is_told_with_file_and_key(folder: Path, values: dict[str, Any], told: str) -> None:
    with_values(folder, values)
    with pytest.raises(Exception):  # noqa: B017 - of many kinds
        scaling_of_peft(folder)
    with pytest.raises(ModelError) as caught:
        read_spec(folder, linear_names(tiny_decoder()))
    assert str(caught.value) == f"{folder / 'adapter_config.json'}: {told}"


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"use_rslora": "false"}, "use_rslora is 'false', not true or false"),  # which PEFT takes for true
        ({"rank_pattern": {f"layers.{n}.q_proj": n for n in range(99)}}, "rank_pattern={'layers.0.q_proj': 0, "),
        ({"peft_type": "IA3"}, "peft_type is IA3, and only LORA is supported"),
        ({"peft_type": "x" * 5000}, "peft_type is xxx"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_value_that_is_not_done_here_is_told_in_a_line_that_is_cut(folder: Path, values: Any, told: str) -> None:
    with_values(folder, values)
    with pytest.raises(ModelError) as caught:
        read_spec(folder, linear_names(tiny_decoder()))
    assert str(caught.value).startswith(f"{folder / 'adapter_config.json'}: {told}")
    assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)
