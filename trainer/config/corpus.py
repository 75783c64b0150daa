"""Rules of the keys that name what is pretrained on. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.config.broken import Broken
from trainer.schema import Config, as_sources

TOKEN_SUFFIX = ".tokens"
TEXT_SUFFIXES = (".txt", ".md")


def is_token_file(path: str) -> bool:
    return path.endswith(TOKEN_SUFFIX)


def corpus_rules(config: Config) -> Iterator[Broken]:
    """Plain text is for pretraining alone: it has no turns."""
    if config.recipe == "pretrain":
        return
    for key, entries in (("data.train", config.data.train), ("data.eval", config.data.eval)):
        plain = [s.path for s in as_sources(entries) if s.path.endswith((TOKEN_SUFFIX, *TEXT_SUFFIXES))]
        if plain:
            message = f"{key} names {plain[0]}, which has no conversations, and the recipe is {config.recipe}"
            yield Broken(key, message, "set recipe=pretrain", ("recipe",))


def corpus_without_effect(config: Config) -> Iterator[tuple[list[str], str]]:
    """Keys that do nothing in pretraining, and why."""
    if config.recipe != "pretrain":
        return
    conversations = ["data.schema", "data.system_prompt", "data.loss_on"]
    yield conversations, ", pretraining reads plain text and trains on all of it"
    yield ["data.overlong"], ", pretraining cuts long documents into pieces and leaves nothing out"
    if all(is_token_file(source.path) for source in as_sources([*config.data.train, *config.data.eval])):
        yield ["data.workers"], ", every source is tokenized already"
