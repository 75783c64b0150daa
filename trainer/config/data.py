"""Rules of the keys that determine which data is read, how much from each source, and whether as a stream. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from os.path import expanduser
from pathlib import Path

from trainer.config.keys import Broken
from trainer.schema import Config, SourceConfig, as_sources

TOKEN_SUFFIX = ".tokens"
TEXT_SUFFIXES = (".txt", ".md")
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
ROW_SUFFIXES = tuple(
    kind + packed for kind in (".jsonl", ".ndjson", ".json", ".csv", ".tsv") for packed in ("", *COMPRESSIONS)
)
MAX_REPEAT = 10_000
"""The order of a whole epoch is planned at once: to repeat a row more often, use more epochs."""


def is_pattern(path: str) -> bool:
    """Whether the path may match several files."""
    return any(char in path for char in "*?[")


def matching(pattern: str, root: Path | None = None) -> list[str]:
    """The paths that match a pattern such as `data/*.jsonl`, in order; the text itself if it is no pattern or nothing
    matches."""
    if not is_pattern(pattern) or (root or Path()).joinpath(pattern).exists():
        return [pattern]
    from glob import glob

    found = glob(expanduser(pattern), root_dir=root, recursive=True)  # noqa: PTH111, PTH207 - Path's takes no absolute one
    return sorted(found) or [pattern]


def data_rules(config: Config) -> Iterator[Broken]:
    """Rules of data.train, data.eval and streams."""
    if not config.data.train:
        yield Broken("data.train", "data.train is empty", "name a JSONL or Parquet file or a dataset")
    yield from _sources("data.train", config.data.train)
    yield from _sources("data.eval", config.data.eval)
    if config.data.streaming:
        yield from _streaming(config)


def _sources(key: str, entries: Sequence[str | SourceConfig]) -> Iterator[Broken]:
    sources = as_sources(entries)
    weights = [source.weight for source in sources]
    for index, source in enumerate(sources):
        place = f"{key}[{index}]"
        for name, value in (("weight", source.weight), ("repeat", source.repeat)):
            if value is not None and not value > 0:
                yield Broken(f"{place}.{name}", f"{place}.{name} is {value}, must be more than 0")
        if source.repeat > MAX_REPEAT:
            yield Broken(f"{place}.repeat", f"{place}.repeat is {source.repeat:g}, must be at most {MAX_REPEAT:,}")
        if source.limit is not None and source.limit < 1:
            yield Broken(f"{place}.limit", f"{place}.limit is {source.limit}, must be 1 or more")
        if source.weight is not None and source.repeat != 1.0:
            message = f"{place} has weight {source.weight:g} and repeat {source.repeat:g}"
            yield Broken(f"{place}.repeat", message, "weights decide how often a row comes; keep one of them")
    if any(weights) and key == "data.eval":
        message = f"{key} has weights, and an evaluation has no mixture"
        yield Broken(key, message, "use limit to look at less of a source")
    elif any(weights) and None in weights:
        place = f"{key}[{weights.index(None)}]"
        yield Broken(place, f"{place} has no weight and others have", "give all sources a weight or none")


def _streaming(config: Config) -> Iterator[Broken]:
    data, key = config.data, "data.streaming"
    if config.recipe != "sft":
        yield Broken(key, f"{key} is true, and the recipe {config.recipe} reads no conversations")
    if config.train.steps is None:
        message = f"{key} is true, and nobody has counted an epoch's steps"
        yield Broken(key, message, "set train.steps instead of train.epochs", ("train.epochs",))
    if data.max_train_rows is not None:
        message = f"data.max_train_rows is {data.max_train_rows}, which a stream ({key}) does not count"
        yield Broken("data.max_train_rows", message, "give the sources a limit: {path, limit}", (key,))
    if data.max_eval_rows is None and not data.eval and data.eval_fraction > 0:
        message = f"data.max_eval_rows is null: with {key} all held-out rows would be looked for first"
        yield Broken("data.max_eval_rows", message, "set it, or name data.eval", (key,))


def data_without_effect(config: Config) -> Iterator[tuple[list[str], str]]:
    """Keys that have no effect beside the others with any value, and why."""
    data, sft = config.data, config.recipe == "sft"
    if not data.streaming:
        yield ["data.stream_window"], ", data.streaming is false"
    sources = as_sources([*data.train, *data.eval])
    if sft and all(source.path.startswith("builtin:") for source in sources):
        yield ["data.schema"], ", the built-in text has questions and answers"
    if data.eval and not (sft and any(source.path.startswith("builtin:") for source in as_sources(data.eval))):
        yield ["data.eval_fraction"], ", data.eval names the held-out data"
    if not data.eval and data.eval_fraction == 0:
        samples = [] if config.run.sample_prompts else ["train.eval_every"]
        judging = ["data.max_eval_rows", *samples, "train.eval_batches"]
        yield judging, ", there is no held-out data (data.eval, data.eval_fraction)"


def is_token_file(path: str) -> bool:
    return path.endswith(TOKEN_SUFFIX)


def corpus_rules(config: Config) -> Iterator[Broken]:
    """Plain text is only for pretraining: it has no turns."""
    if config.recipe == "pretrain":
        return
    for key, entries in (("data.train", config.data.train), ("data.eval", config.data.eval)):
        plain = [s.path for s in as_sources(entries) if s.path.endswith((TOKEN_SUFFIX, *TEXT_SUFFIXES))]
        if plain:
            message = f"{key} names {plain[0]}, which has no conversations, and the recipe is {config.recipe}"
            yield Broken(key, message, "set recipe=pretrain", ("recipe",))


def corpus_without_effect(config: Config) -> Iterator[tuple[list[str], str]]:
    """Keys that have no effect in pretraining, and why."""
    if config.recipe != "pretrain":
        return
    conversations = ["data.schema", "data.system_prompt", "data.loss_on"]
    yield conversations, ", pretraining reads plain text and trains on all of it"
    yield ["data.overlong"], ", pretraining cuts long documents into pieces and leaves nothing out"
    if all(is_token_file(source.path) for source in as_sources([*config.data.train, *config.data.eval])):
        yield ["data.workers"], ", every source is tokenized already"
