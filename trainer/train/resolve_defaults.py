"""Resolves a run's defaults: before anything is built, with a log line each; a resumed run keeps them.

A default that depends on what is trained, or on which machine, is a null or `auto` in the config. Each checkpoint's
config contains the resolved value, so that a later version with another default continues with the run's own value.
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
from trainer.config.parallel import mesh_of
from trainer.dist import Dist, on_rank0
from trainer.errors import ConfigError
from trainer.optim.build import had_8bit_embeddings
from trainer.schema import Config, kind_of_training, learning_rate_of, with_key
from trainer.train.precision import ResolvedConfig, foresee_precision, resolve_precision

Saved = Mapping[str, Any]
"""The config in a checkpoint; empty without a checkpoint."""


def resolve_defaults(config: Config, dist: Dist, run_dir: Path | None = None) -> ResolvedConfig:
    """Resolve all defaults: from the checkpoint that the run resumes from, else by what is trained and where.

    Every rank must call this. `run_dir`: None if there is no run and so no checkpoint. Raises ConfigError if
    `optim.min_learning_rate` is above the run's learning rate, or if the nodes have no such mesh.
    """
    saved = saved_config(config, run_dir, dist) if run_dir else {}
    return _with_mesh(_with_optim(resolve_precision(config, dist, saved), saved), dist)


def foresee(config: Config) -> ResolvedConfig:
    """The resolved defaults for an inspection, without a checkpoint."""
    return _with_optim(foresee_precision(config), {})


def saved_config(config: Config, run_dir: Path, dist: Dist) -> Saved:
    """The config in the first readable checkpoint of those to resume from; empty if there is none."""
    paths = choose(config, run_dir, dist).paths

    def read() -> Saved:
        for path in paths:
            try:
                saved = read_info(path).extra.get("config")
            except CheckpointError:  # reported when it is loaded; the run then uses the previous one
                continue
            if isinstance(saved, Mapping):
                return saved
        return {}

    return on_rank0(dist, read)


def _with_optim(before: ResolvedConfig, saved: Saved) -> ResolvedConfig:
    config, lines = _with_rate(before.config, _section(saved, "optim"))
    config, more = _with_embeddings(config, _section(saved, "optim"))
    return ResolvedConfig(config, [*before.lines, *lines, *more])


def _with_mesh(before: ResolvedConfig, dist: Dist) -> ResolvedConfig:
    nodes = dist.nodes
    if nodes is None:
        return before
    mesh = mesh_of(before.config, nodes.counts, in_order=list(nodes.of_rank) == sorted(nodes.of_rank))
    if mesh is None:
        return before
    config = before.config
    if mesh.replicas is not None:
        config = with_key(config, "parallel.dp_replicate", mesh.replicas)
    return ResolvedConfig(config, [*before.lines, mesh.line])


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
