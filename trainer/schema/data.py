"""The section `data`: what is read, and how much of each source."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from trainer.schema.key import AT_LEAST_0, AT_LEAST_1, AT_LEAST_2, SHARE, key

SCHEMA_KEYS = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "prompt_completion": ("prompt", "completion"),
    "instruction_output": ("instruction", "output"),
    "question_answer": ("question", "answer"),
}
"""Columns that a row of each schema must have; `auto` takes the first schema of this order that fits."""


def schema_of(columns: Collection[str]) -> str | None:
    """The schema that the columns of a first row show."""
    return next((name for name, keys in SCHEMA_KEYS.items() if all(key in columns for key in keys)), None)


def unknown_columns(columns: Collection[str]) -> tuple[str, str]:
    """What is wrong with a first row whose columns show no schema, and what to do."""
    known = "; ".join(" + ".join(keys) for keys in SCHEMA_KEYS.values())
    what = f"no known schema has the keys {', '.join(map(repr, columns)) or '(none)'}"
    return what, f"known: {known}; rename the columns or set data.schema"


@dataclass(frozen=True)
class SourceConfig:
    """One source of a mixture; a plain text in its place is its path alone."""

    path: str
    """As the entries of `data.train`: a file, a data set or `builtin:stdlib-docs`."""
    weight: float | None = None
    """Its share of the examples, relative to the other sources' weights; all sources have one or none has. None: every
    source gives its own examples once an epoch."""
    repeat: float = 1.0
    """How often an epoch contains each of its examples; 0.5: half of them. Not together with `weight`."""
    limit: int | None = None
    """Read at most this many of its examples; None: all."""


def as_sources(entries: Sequence[str | SourceConfig]) -> list[SourceConfig]:
    """The entries of `data.train` or `data.eval`, each with its settings."""
    return [SourceConfig(entry) if isinstance(entry, str) else entry for entry in entries]


@dataclass(frozen=True)
class DataConfig:
    """What is read, how it becomes tokens, and which of them are targets. An *example* is one record of the data: a
    conversation, or a text. A *row* is one sequence of seq_len tokens that the model processes; with `packing` it may
    contain several examples. Without `packing` a row contains one example, and may be shorter. A text of pretraining
    that is longer than a row continues in other rows."""

    train: list[str | SourceConfig] = key(["builtin:stdlib-docs"], aliases=("dataset",))
    """JSONL, JSON, CSV or TSV files (also .gz, .bz2, .xz, .zst), Parquet files, patterns of them (`data/*.jsonl`),
    names or folders of Hugging Face data sets, or `builtin:stdlib-docs`; a mapping {path, weight, repeat, limit} in
    place of a text says how much of it. With recipe=pretrain: .tokens files as `torchferry tokenize` makes them, .txt
    or .md files or folders of them, or examples with a column `text`."""
    eval: list[str | SourceConfig] = field(default_factory=list)
    """Held-out data, same kinds. Empty: `eval_fraction` of train (builtin: its held-out modules)."""
    eval_fraction: float = key(0.05, limit=SHARE)
    """Share of the training examples held out when `eval` is empty; 0: no evaluation."""
    train_split: str = "train"
    """Split of the Hugging Face data sets in `train`, and of JSON files that hold several."""
    eval_split: str = "test"
    """Split of those in `eval`."""
    schema: Literal[
        "auto", "messages", "conversations", "prompt_completion", "instruction_output", "question_answer"
    ] = "auto"
    """The columns of an example; `auto`: by their names. messages and conversations hold turns, the others two texts.
    `system` and `tools` are read beside any of them; a turn with `weight: 0` (`train: false`, `loss: false`) is no
    target."""
    tokenizer: str = "auto"
    """`auto`: the model's own when it has a name, else `builtin:bytes`; or a name or folder."""
    chat_template: str | None = None
    """Path of a Jinja file that replaces the tokenizer's template."""
    system_prompt: str | None = None
    """Put before conversations that have no system turn."""
    loss_on: Literal["assistant", "all"] = key("assistant", aliases=("assistant_only_loss",))
    """Which tokens are targets: the assistant's turns with their end token (the template's newline after it is
    none), or everything."""
    turns: Literal["all", "last"] = "all"
    """Which of the assistant's turns are targets: all, or those after the last question. Templates of reasoning models
    leave the thoughts of earlier turns out."""
    seq_len: int = key(512, limit=AT_LEAST_2, aliases=("max_length", "max_seq_len", "max_seq_length"))
    """Tokens per row, at most."""
    packing: bool = True
    """Several examples share a row, and no example sees another."""
    overlong: Literal["drop", "truncate"] = "truncate"
    """A conversation longer than seq_len. `drop`: it is left out and counted; `truncate`: its end is cut off."""
    max_train_rows: int | None = key(None, limit=AT_LEAST_1)
    """Read at most this many examples from `train`, counted before packing; None: all."""
    max_eval_rows: int | None = key(256, limit=AT_LEAST_1)
    """Use at most this many held-out examples, counted before packing; None: all."""
    shuffle: bool = True
    """A new order of the examples in every epoch, by train.seed; false: as read."""
    workers: int = key(0, limit=AT_LEAST_0, aliases=("dataloader_num_workers",))
    """Processes that tokenize the data at the start; 0: the training process does it."""
    streaming: bool = False
    """Begin after the first window instead of reading everything first; each rank reads, needs `train.steps`."""
    stream_window: int = key(4096, limit=AT_LEAST_1)
    """Examples that are shuffled and packed together when streaming; two windows are held in memory."""
