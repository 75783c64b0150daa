"""Which checkpoint a run goes on from, and whether it may."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainer.checkpoint.folders import is_complete, newest_complete
from trainer.checkpoint.loading import Resumed
from trainer.data.loader import Data
from trainer.dist import Dist, on_rank0
from trainer.errors import ConfigError, ModelError
from trainer.models.decoder import DecoderShape
from trainer.schema import CHECKPOINTS_DIR, RESTARTED_ENV, Config


def resume_path(config: Config, run_dir: Path, dist: Dist) -> Path | None:
    """The checkpoint that `train.resume` means; None for a run that starts anew.

    After a restart by the host, what this run has saved comes first: `train.resume` says where it began.
    """
    if config.train.resume == "auto" or os.environ.get(RESTARTED_ENV):
        own = on_rank0(dist, lambda: newest_complete(run_dir / CHECKPOINTS_DIR))
        if own is not None or config.train.resume == "auto":
            return own
    if config.train.resume == "never":
        return None
    path = Path(config.train.resume).expanduser()
    if not is_complete(path):
        newest = newest_complete(path / CHECKPOINTS_DIR)
        raise ConfigError(
            f"train.resume is {config.train.resume}, and {path.absolute()} is no complete checkpoint",
            hint=f"did you mean {newest}?" if newest else "name a folder step_NNNNNN that holds a file COMPLETE",
        )
    return path


def check_resumable(path: Path, saved: Resumed, shape: DecoderShape, data: Data) -> None:
    """Go to the checkpoint's place in the data. Raises when model, data or length of the run are not those of it."""
    now = asdict(shape)
    before = saved.extra.get("shape", now)
    changed = [f"{name} {before.get(name)} -> {now[name]}" for name in now if before.get(name) != now[name]]
    if changed:
        raise ModelError(
            f"{path} was made by another model: {', '.join(changed)}; restore it, or start anew with train.resume=never"
        )
    data.train.load_state_dict(saved.extra["data"])
    if saved.step > data.train.total_steps:
        raise ConfigError(
            f"{path} is after step {saved.step}, and the run has {data.train.total_steps} steps",
            hint="raise train.steps, or name an earlier checkpoint in train.resume",
        )


def check_same_part(path: Path, before: dict[str, str], now: dict[str, str]) -> None:
    """Raise ModelError when the run trains another part of the model, or over another base, than the checkpoint's."""
    changed = [
        f"{name} {before.get(name, 'none')} -> {now.get(name, 'none')}"
        for name in {**before, **now}
        if before.get(name) != now.get(name)
    ]
    if changed:
        raise ModelError(
            f"{path} was made by a run that trains something else: {', '.join(changed)}",
            hint="restore lora, model.freeze and model.name as they were, or start anew with train.resume=never",
        )


def changed_keys(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """`KEY OLD -> NEW` of everything that decides the steps to come and is not as the checkpoint's run had it."""
    keys = [("optim", key) for key in now["optim"]]
    keys += [("train", key) for key in ("steps", "epochs", "micro_batch_size", "grad_accum_steps", "global_batch_size")]
    keys += [("train", "micro_batch_tokens"), ("train", "precision"), ("parallel", "reduce_dtype")]
    pairs = [(f"{section}.{key}", before.get(section, {}).get(key), now[section][key]) for section, key in keys]
    return [f"{key} {old} -> {new}" for key, old, new in pairs if before and old != new]
