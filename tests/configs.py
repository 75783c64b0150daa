"""Configs of tests: for the CPU, in fp32."""

from __future__ import annotations

from typing import Any

from trainer.config.load import config_from_dict
from trainer.schema import Config

SMALL_MODEL = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1}


def config_of(**sections: Any) -> Config:
    """The config of these sections, on the CPU and in fp32 unless they say otherwise."""
    values: dict[str, Any] = {"target": {"device": "cpu"}, "train": {"precision": "fp32"}}
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section} if isinstance(section, dict) else section
    return config_from_dict(values)
