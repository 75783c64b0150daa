"""Chooses the checkpoint that a run resumes from, checks that it fits the run, and handles damaged ones."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.checkpoint.agree import agree_on, settle
from trainer.checkpoint.errors import DAMAGED, CheckpointError, load_error, on_all
from trainer.checkpoint.folders import (
    STATE_FILE,
    is_complete,
    missing,
    newest_complete,
    restore_replaced,
    set_aside,
    step_name,
    steps_in,
)
from trainer.checkpoint.load import Resumed, load, verify
from trainer.checkpoint.reach import BRING, check_reach
from trainer.checkpoint.shards import differences, sharded_state
from trainer.checkpoint.states import ExtraState
from trainer.config.load import config_to_dict
from trainer.data.batches.steps import Loader
from trainer.dist import Dist, gather, on_keepers, on_rank0
from trainer.errors import ConfigError, DataError, ModelError
from trainer.files import expanded
from trainer.nodes import Storages
from trainer.optim.build import had_8bit_embeddings
from trainer.optim.schedules import lr_multiplier
from trainer.schema import CHECKPOINTS_DIR, RESTARTED_ENV, Config
from trainer.typed import InvalidData
from trainer.words import first_few

BRING_OR_ANEW = f"{BRING}; train.resume=never starts anew"
ANEW = "restore it, or start anew with train.resume=never"
RECIPE = "recipe"
"""The key of the recipe's own state in `state.json`; absent if the recipe has none."""


@dataclass(frozen=True)
class Choice:
    """The checkpoints to try, best first; empty for a run that starts from the beginning."""

    paths: list[Path] = field(default_factory=list)
    incomplete: list[Path] = field(default_factory=list)
    """Incomplete checkpoints. The run skips and reports those that are newer than the one it resumes from."""
    reasons: Mapping[Path, str] = field(default_factory=dict)
    """Why a checkpoint is incomplete, if its own folder does not tell: another storage lacks its part."""


@dataclass(frozen=True)
class CheckpointRequirements:
    """Properties that a checkpoint must share with the run."""

    shape: Mapping[str, Any]
    trained_part: Mapping[str, str] = field(default_factory=dict)
    """Which part of the model is trained, on which base; see `trained_part`."""
    hashes: Mapping[str, str] = field(default_factory=dict)


def choose(config: Config, run_dir: Path, dist: Dist) -> Choice:
    """The checkpoints that `train.resume` refers to, as rank 0 finds them.

    After a restart by the host, this run's own checkpoints come first: `train.resume` names where the run began.
    """
    own, storages = Choice(), dist.storages
    continues = config.train.resume == "auto" or _is_restarted(dist)
    if continues and storages is None:
        own = on_rank0(dist, lambda: _own(run_dir / CHECKPOINTS_DIR))
    elif continues and storages is not None:
        own = _own_of_all(run_dir / CHECKPOINTS_DIR, storages, dist)
    if own.paths or config.train.resume in ("auto", "never"):
        return own
    path = expanded(config.train.resume)
    if storages is not None:
        return _named_of_all(path, storages, dist)
    wrong = on_rank0(dist, lambda: None if is_complete(path) else (missing(path), newest_complete(_inside(path))))
    if wrong is not None:
        reason, newest = wrong
        raise ConfigError(
            f"train.resume is {config.train.resume}, and {path.absolute()} is no complete checkpoint: {reason}",
            hint=f"did you mean {newest}?" if newest else "name a folder step_NNNNNN that holds a file COMPLETE",
        )
    return Choice([path])


def resume(
    choice: Choice,
    required: CheckpointRequirements,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Loader,
    dist: Dist,
    *,
    state: ExtraState | None = None,
) -> tuple[Resumed | None, list[str]]:
    """Fill model, optimizer, random state, position in the data and `state` from the first readable checkpoint.

    Returns its further content, and notes for the user. Unreadable checkpoints are renamed, never deleted. Raises
    CheckpointError if none can be read; ConfigError, DataError or ModelError if it belongs to another run.
    """
    failures: list[tuple[Path, CheckpointError]] = []
    for path in choice.paths:
        try:
            saved = verify(path, dist)
            tensors = _differences(path, module, optimizer, dist)
            _check_whole(path, saved)
            check_optimizer(path, saved.extra.get("config") or {}, optimizer)
            _check(path, saved, required, tensors, data)
            _check_state(path, saved.extra.get(RECIPE), state)
            check_reach(path, saved.spread, lambda: sharded_state(module, optimizer), dist)
            load(path, module, optimizer, dist, verified=saved)
        except CheckpointError as error:
            failures.append((path, error))
            continue
        return saved, [
            *_notes(path, choice, failures, dist),
            *([] if saved.has_verified_state else [_without_checksum(path)]),
        ]
    if len(failures) == 1 and len(choice.paths) == 1:
        raise failures[0][1]
    if failures:
        folder = choice.paths[0].parent
        told = "; ".join(f"{path.name}: {_reason(path, error)}" for path, error in failures[:5])
        told += f"; and {len(failures) - 5} more" if len(failures) > 5 else ""
        raise CheckpointError(
            f"none of the {len(failures)} checkpoints in {folder} can be loaded: {told}. Restore one of them, or start "
            f"anew in another --run-dir"
        )
    return None, _notes(None, choice, failures, dist)


def render_doomed(run_dir: Path, start_step: int) -> list[str]:
    """A warning if the folder has checkpoints of later steps than the run starts from: its saves delete them."""
    later = [str(step) for step in steps_in(run_dir / CHECKPOINTS_DIR) if step > start_step]
    if not later:
        return []
    return [
        f"warning: {run_dir / CHECKPOINTS_DIR} holds checkpoints of later steps ({', '.join(later)}) than this start "
        f"begins from ({start_step}); its saves delete them. Copy them away, or stop and name another --run-dir"
    ]


def check_same_part(path: Path, before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Raise ModelError if the run trains another part of the model, or on another base, than the checkpoint's run."""
    changed = [
        f"{name} {before.get(name, 'none')} -> {now.get(name, 'none')}"
        for name in {**before, **now}
        if before.get(name) != now.get(name)
    ]
    if changed:
        raise ModelError(
            f"{path} was made by a run that trains something else: {first_few(changed, 8)}",
            hint="restore lora, model.freeze and model.name as they were, or start anew with train.resume=never",
        )


def check_optimizer(path: Path, before: Mapping[str, Any], now: torch.optim.Optimizer) -> None:
    """Raise ConfigError if 8-bit state would have to become fp32 state; the opposite is possible."""
    saved = before.get("optim")
    saved = saved if isinstance(saved, Mapping) else {}
    if saved.get("optimizer") == "adamw8bit" and isinstance(now, torch.optim.AdamW):
        raise ConfigError(
            f"{path} holds the 8-bit state of optim.optimizer adamw8bit, which adamw cannot take over",
            hint="keep optim.optimizer=adamw8bit, or start anew with train.resume=never",
        )
    if had_8bit_embeddings(saved) and getattr(now, "kept_in_fp32", None):
        raise ConfigError(
            f"{path} holds 8-bit state of embeddings, which cannot become 32-bit state",
            hint="drop optim.embeddings_8bit, or start anew with train.resume=never",
        )


def changed_keys(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """`KEY OLD -> NEW` for each setting that affects further steps and differs from the checkpoint's run.

    Keys that the checkpoint does not contain are left out.
    """
    keys = [("optim", key) for key in now["optim"]]
    keys += [("train", key) for key in ("steps", "epochs", "micro_batch_size", "grad_accum_steps", "global_batch_size")]
    keys += [("train", "micro_batch_tokens"), ("train", "precision"), ("parallel", "reduce_dtype")]
    sections = {name: before[name] for name in now if isinstance(before.get(name), Mapping)}
    known = [(section, key) for section, key in keys if key in sections.get(section, {})]
    pairs = [(f"{section}.{key}", sections[section][key], now[section][key]) for section, key in known]
    return [f"{key} {old} -> {new}" for key, old, new in pairs if old != new]


def render_changes(extra: Mapping[str, Any], config: Config, *, step: int, total_steps: int, peak: float) -> list[str]:
    """A note on changed settings since the checkpoint, and one on a changed length; none without a checkpoint."""
    changed = changed_keys(extra.get("config") or {}, config_to_dict(config))
    horizon = render_horizon(config, step=step, before=extra.get("total_steps"), now=total_steps, peak=peak)
    lines = [f"changed since the checkpoint, in force from here on: {', '.join(changed)}"] if changed else []
    return [f"note: {line}" for line in [*lines, *([horizon] if horizon else [])]]


def render_horizon(config: Config, *, step: int, before: int | None, now: int, peak: float) -> str | None:
    """How a changed length of the run changes the learning rate; None if the length is the same, or unknown.

    `peak`: the highest learning rate of the schedule.

    The schedule is always that of the run's current length, as if the run had had this length from the start.
    """
    if before is None or before == now:
        return None
    rates = [peak * lr_multiplier(config.optim, total)(step) for total in (before, now)]
    return (
        f"the run had {before} steps and has {now}: the schedule is that of {now} steps from here on, "
        f"so the learning rate of step {step + 1} is {rates[1]:.3g}, not {rates[0]:.3g}"
    )


def _own(folder: Path) -> Choice:
    try:
        incomplete = restore_replaced(folder)
        return Choice(list(reversed(steps_in(folder).values())), list(incomplete.values()))
    except OSError as error:
        reason = f"cannot list the checkpoints in {folder}: {error.strerror}"
        raise CheckpointError(f"{reason}. Make it readable, or start anew in another --run-dir") from error


def _is_restarted(dist: Dist) -> bool:
    """Whether the host has started the run again; on several nodes, whether any host has."""
    mine = bool(os.environ.get(RESTARTED_ENV))
    return mine if dist.nodes is None else any(gather(mine, dist.control_group))


def _own_of_all(folder: Path, storages: Storages, dist: Dist) -> Choice:
    """The checkpoints that all storages hold together. Raises ConfigError if there are some, but none is whole."""
    agreed = settle(folder, storages, dist.rank, dist.control_group)
    if agreed.lacking and not agreed.whole:
        told = "; ".join(f"{step_name(step)}: {why}" for step, why in list(agreed.lacking.items())[-3:])
        raise ConfigError(f"no checkpoint in {folder} is whole on all nodes: {told}", hint=BRING_OR_ANEW)
    lacking = {folder / step_name(step): why for step, why in agreed.lacking.items()}
    return Choice([folder / step_name(step) for step, _ in agreed.whole], list(lacking), lacking)


def _named_of_all(path: Path, storages: Storages, dist: Dist) -> Choice:
    """The checkpoint that `train.resume` names, if it is whole on all storages. Else raises ConfigError."""
    agreed = agree_on(path, storages, dist.rank, dist.control_group)
    if agreed.whole:
        return Choice([path])
    why = "; ".join(agreed.lacking.values()) or f"no node has {path.absolute()}"
    raise ConfigError(f"train.resume is {path}, which is not whole on all nodes: {why}", hint=BRING_OR_ANEW)


def _inside(run_dir: Path) -> Path:
    return run_dir / CHECKPOINTS_DIR


def _differences(path: Path, module: nn.Module, optimizer: torch.optim.Optimizer, dist: Dist) -> list[str]:
    found: list[str] = []
    failure = partial(load_error, path)
    on_all(lambda: found.extend(differences(path, module, optimizer)), dist.control_group, failure)
    return found


def _check_whole(path: Path, saved: Resumed) -> None:
    """Raise CheckpointError if state.json lacks the data position that every save writes: a state.json without a
    verified checksum can be incomplete."""
    if not isinstance(saved.extra.get("data"), Mapping):
        raise load_error(path, f"{STATE_FILE} does not say what a save writes there: data")


def _check(path: Path, saved: Resumed, required: CheckpointRequirements, tensors: Sequence[str], data: Loader) -> None:
    """Continue at the checkpoint's position in the data. Raises if model, data or length of the run do not fit it."""
    before = saved.extra.get("shape") or required.shape
    changed = [f"{name} {before.get(name)} -> {new}" for name, new in required.shape.items() if before.get(name) != new]
    if changed:
        raise ModelError(f"{path} was made by another model: {first_few(changed, 8)}", hint=ANEW)
    check_same_part(path, saved.extra.get("part") or {}, required.trained_part)
    hashes = saved.extra.get("hashes") or {}
    for name, new in required.hashes.items():
        if hashes.get(name, new) != new:
            raise ModelError(f"{path} was made with another {name}: {hashes[name]} -> {new}", hint=ANEW)
    if tensors:
        message = f"{path} holds other tensors than this run trains: {'; '.join(tensors[:3])}"
        raise ModelError(
            message, hint="restore optim and what is trained as they were, or start anew with train.resume=never"
        )
    try:
        data.load_state_dict(saved.extra["data"])
    except InvalidData as damage:
        raise load_error(path, f"{STATE_FILE}: {damage.within('data')}") from None
    except DataError as error:
        raise DataError(error.message, where=str(path), hint=error.hint) from None
    if saved.step > data.total_steps:
        raise ConfigError(
            f"{path} is after step {saved.step}, and the run has {data.total_steps} steps",
            hint="raise train.steps, or name an earlier checkpoint in train.resume",
        )


def _check_state(path: Path, saved: Any, state: ExtraState | None) -> None:
    """Restore the recipe's state. Raises ModelError if the checkpoint lacks it, or has one that the recipe lacks."""
    if (saved is None) != (state is None):
        what = "no state of its recipe" if saved is None else "the state of another recipe"
        raise ModelError(f"{path} holds {what}", hint=ANEW)
    if state is not None:
        state.load_state_dict(saved)


def _notes(path: Path | None, choice: Choice, failures: list[tuple[Path, CheckpointError]], dist: Dist) -> list[str]:
    reasons = {bad: f"cannot load {bad}: {_reason(bad, error)}" for bad, error in failures}
    passed = [bad for bad in choice.incomplete if path is None or _step_of(bad) > _step_of(path)]
    reasons |= {bad: f"{bad} is not complete: {choice.reasons.get(bad) or missing(bad)}" for bad in passed}
    aside = on_keepers(dist, lambda: {bad: set_aside(bad) for bad in reasons if bad.exists()})
    names = {bad: f"it is {aside[bad].name} now" if bad in aside else "it is set aside" for bad in reasons}
    told = [f"warning: {reason}; {names[bad]}" for bad, reason in reasons.items()]
    goes_on = f"going on from {path.name}, the one before" if path else "beginning anew: there is no other checkpoint"
    return [*told, goes_on] if told else []


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def _without_checksum(path: Path) -> str:
    return (
        f"note: {path.name} is of an earlier version, which kept no checksum of {STATE_FILE}: "
        "that its step and its place in the data are what was saved cannot be checked"
    )


def _reason(path: Path, error: CheckpointError) -> str:
    """The error's reason, without the path and without the advice for a single checkpoint."""
    return str(error).removesuffix(f". {DAMAGED}").replace(f"cannot load {path}: ", "")
