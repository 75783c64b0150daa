"""What defaults become for a run: settled before anything is built, said, and kept when the run resumes.

A default that depends on what is trained, or on where, is a null or `auto` in the config. The settled value is in each
checkpoint's config, so that a later version with another default goes on as the run began.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.checkpoint.errors import CheckpointError
from trainer.checkpoint.load import read_info
from trainer.checkpoint.resume import choose
from trainer.dist import Dist, on_rank0
from trainer.errors import ConfigError
from trainer.optim.build import had_8bit_embeddings
from trainer.schema import Config, kind_of_training, learning_rate_of, with_key
from trainer.train.precision import ResolvedConfig, foresee_precision, resolve_precision

Saved = Mapping[str, Any]
"""The config in a checkpoint; empty where there is none."""


def resolve_defaults(config: Config, dist: Dist, run_dir: Path | None = None) -> ResolvedConfig:
    """Settle all of them: as the checkpoint has it that the run resumes, else by what is trained and where.

    Every rank calls this. `run_dir`: None where there is no run, and so no checkpoint to follow. Raises ConfigError
    where `optim.min_learning_rate` lies above the rate that the run has.
    """
    saved = saved_config(config, run_dir, dist) if run_dir else {}
    return _with_optim(resolve_precision(config, dist, saved), saved)


def foresee(config: Config) -> ResolvedConfig:
    """What they would become in a run that is only inspected, and begins anew."""
    return _with_optim(foresee_precision(config), {})


def saved_config(config: Config, run_dir: Path, dist: Dist) -> Saved:
    """The config in the checkpoint to resume from, of the first that can be read; empty where there is none."""
    paths = choose(config, run_dir, dist).paths

    def read() -> Saved:
        for path in paths:
            try:
                saved = read_info(path).extra.get("config")
            except CheckpointError:  # told when it is loaded, and the one before is taken
                continue
            if isinstance(saved, Mapping):
                return saved
        return {}

    return on_rank0(dist, read)


def _with_optim(before: ResolvedConfig, saved: Saved) -> ResolvedConfig:
    config, lines = _with_rate(before.config, _section(saved, "optim"))
    config, more = _with_embeddings(config, _section(saved, "optim"))
    return ResolvedConfig(config, [*before.lines, *lines, *more])


def _with_rate(config: Config, saved: Saved) -> tuple[Config, list[str]]:
    if config.optim.learning_rate is not None:
        return config, []
    rate, why = saved.get("learning_rate"), "as the checkpoint has it"
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < math.inf:
        rate, why = learning_rate_of(config), f"for {kind_of_training(config)}"
    if config.optim.min_learning_rate > rate:
        message = f"optim.min_learning_rate is {config.optim.min_learning_rate:g}, more than the rate {rate:g}, {why}"
        raise ConfigError(message, hint="set optim.learning_rate")
    line = f"learning rate: {rate:g}, {why} (optim.learning_rate is null)"
    return with_key(config, "optim.learning_rate", float(rate)), [line]


def _with_embeddings(config: Config, saved: Saved) -> tuple[Config, list[str]]:
    optim = config.optim
    if optim.optimizer != "adamw8bit" or optim.embeddings_8bit is not None:
        return config, []
    kept = had_8bit_embeddings(saved)
    line = (
        "8-bit optimizer state, that of embeddings too, as the checkpoint has it (optim.embeddings_8bit)"
        if kept
        else "8-bit optimizer state; that of embeddings has 32 bits (optim.embeddings_8bit)"
    )
    return replace(config, optim=replace(optim, embeddings_8bit=kept)), [line]


def _section(saved: Saved, name: str) -> Saved:
    section = saved.get(name)
    return section if isinstance(section, Mapping) else {}
