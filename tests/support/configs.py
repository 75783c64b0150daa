"""Configs of tests: for the CPU, in fp32; and what a config's words become, or the error that they give."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.ferry import REPO
from trainer.config.load import (
    ConfigError,
    check_config,
    config_from_dict,
    load_config,
)
from trainer.schema import (
    Config,
)

SMALL_MODEL = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1}


def config_of(**sections: Any) -> Config:
    """The config of these sections, on the CPU and in fp32 unless they say otherwise."""
    values: dict[str, Any] = {"target": {"device": "cpu"}, "train": {"precision": "fp32"}}
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section} if isinstance(section, dict) else section
    return config_from_dict(values)


def override(*overrides: str) -> Config | str:
    try:
        return load_config(REPO / "configs/02_debug_sft_fsdp.py", overrides)
    except ConfigError as error:
        return error.render()


def error_of(config: Config) -> str:
    with pytest.raises(ConfigError) as caught:
        check_config(config)
    return caught.value.render()
