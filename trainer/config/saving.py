"""Rules of the keys that say which checkpoints are kept. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.config.broken import Broken
from trainer.schema import Config

KEY = "train.keep_best"


def best_rules(config: Config) -> Iterator[Broken]:
    """The best checkpoints can only be chosen where each has a held-out loss."""
    train = config.train
    if train.keep_best == 0 or train.save_every == 0:
        return
    best = f"{KEY} is {train.keep_best}"
    if train.eval_every == 0 or train.save_every % train.eval_every:
        message = f"{best}, but not every save, each {train.save_every} steps, has an evaluation (train.eval_every)"
        hint = f"set train.eval_every={train.save_every}, or a number that divides it"
        yield Broken(KEY, message, hint, ("train.eval_every", "train.save_every"))
    if not config.data.eval and config.data.eval_fraction == 0:
        message = f"{best}, but there is no held-out data"
        yield Broken(KEY, message, "set data.eval or data.eval_fraction", ("data.eval_fraction",))


def saving_without_effect(config: Config) -> Iterator[tuple[list[str], str]]:
    """Keys that do nothing beside the others, whatever they say, and why."""
    kept = ["train.keep_best", "train.keep_every"]
    if config.train.keep_last == 0:
        yield kept, ", train.keep_last=0 keeps every checkpoint"
    if config.train.save_every == 0:
        yield [*kept, "train.async_save"], ", train.save_every=0 saves only at the end"
