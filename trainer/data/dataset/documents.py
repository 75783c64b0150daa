"""Makes the documents of training and evaluation from the config's sources, with a report on all that was left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from trainer.data.dataset.order import Mixture, epoch_documents
from trainer.data.dataset.report import SourceShare, SplitReport, some
from trainer.data.dataset.store import ListStore, RowTable, Selection, Store, collect
from trainer.data.rows.findings import Finding
from trainer.data.rows.messages import Row
from trainer.data.rows.sources import HELD_OUT, STDLIB_DOCS, TRAIN, read_conversations
from trainer.data.tokenize.chat import Encoded, special_ids
from trainer.data.tokenize.encode import SourceRow, content_key, encode_rows
from trainer.errors import DataError
from trainer.schema import Config, SourceConfig, as_sources

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SAMPLE_DOCS = 100
KEYS = 2**64
"""Content hashes are below this number."""


@dataclass(frozen=True)
class Source:
    """One source: `split` as for `read_conversations`; `held_out`: it is only for evaluation."""

    settings: SourceConfig
    split: str
    held_out: bool

    @property
    def path(self) -> str:
        return self.settings.path


@dataclass(frozen=True)
class Documents:
    """Documents in reading order, each with at least one target and no longer than seq_len."""

    docs: Selection
    report: SplitReport
    mixture: Mixture
    keys: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint64))
    """[rows] uint64, a content hash of each row of the split, including dropped rows."""
    findings: list[Finding] = field(default_factory=list)
    """The findings in all rows that were read together with these."""

    @classmethod
    def of(cls, docs: Sequence[Encoded], report: SplitReport | None = None) -> Documents:
        """Documents in memory, each used once per epoch."""
        selection = Selection(ListStore(docs), np.arange(len(docs)))
        return cls(selection, report or SplitReport("train"), Mixture.of_one(len(docs)))

    @property
    def lengths(self) -> list[int]:
        """Tokens of each document."""
        lengths: list[int] = self.docs.lengths.tolist()
        return lengths

    def fingerprint(self) -> str:
        """Changes with any id, token, target or their order."""
        settings = [(source.weight, source.repeat) for source in self.mixture.settings]
        plain = all(pair == (None, 1.0) for pair in settings)
        return self.docs.fingerprint() if plain else f"{self.docs.fingerprint()} {settings}"

    def __len__(self) -> int:
        return len(self.docs)


def list_sources(config: Config) -> list[Source]:
    """All that a run reads, in order: the training sources, then those for evaluation alone."""
    data = config.data
    train = [Source(entry, _split(entry, data.train_split, TRAIN), False) for entry in as_sources(data.train)]
    if data.eval:
        return train + [
            Source(entry, _split(entry, data.eval_split, HELD_OUT), True) for entry in as_sources(data.eval)
        ]
    if data.eval_fraction > 0 and any(source.path == STDLIB_DOCS for source in train):
        train.append(Source(SourceConfig(STDLIB_DOCS), HELD_OUT, True))
    return train


def _split(entry: SourceConfig, of_data_sets: str, builtin: str) -> str:
    return builtin if entry.path.startswith("builtin:") else of_data_sets


def read_rows(config: Config) -> Iterator[SourceRow]:
    """(source, row) of all rows in order; `data.max_*_rows` and each source's `limit` at most."""
    sources = list(enumerate(list_sources(config)))
    train = ((index, source) for index, source in sources if not source.held_out)
    held_out = ((index, source) for index, source in sources if source.held_out)
    yield from islice(_read_all(train, config), config.data.max_train_rows)
    yield from islice(_read_all(held_out, config), config.data.max_eval_rows)


def _read_all(sources: Iterator[tuple[int, Source]], config: Config) -> Iterator[SourceRow]:
    for index, source in sources:
        yield from ((index, row) for row in read_source(config, source))


def read_source(config: Config, source: Source) -> Iterator[Row]:
    """The rows of one source in its own order, `limit` at most."""
    return read_conversations(
        source.path,
        split=source.split,
        schema=config.data.schema,
        limit=source.settings.limit,
        held_out_share=builtin_share(config),
    )


def read_stream_eval(config: Config, tokenizer: PreTrainedTokenizerFast) -> Documents:
    """The evaluation documents of a streaming run: those of data.eval, or the first held-out ones of each source."""
    store = ListStore()
    rows = islice(_stream_eval_rows(config), config.data.max_eval_rows)
    table = collect(encode_rows(rows, tokenizer, config.data), store, config.data)
    return _documents("eval", store, table, np.arange(len(table.key)), config)


def _stream_eval_rows(config: Config) -> Iterator[SourceRow]:
    sources, limit = list(enumerate(list_sources(config))), config.data.max_eval_rows or 0
    own = [(index, source) for index, source in sources if not source.held_out and held_out_share(config, source) > 0]
    for number, pair in enumerate(own):
        rows = ((index, row) for index, row in _read_all(iter([pair]), config) if is_held_out(row, config))
        yield from islice(rows, (number + 1) * limit // len(own) - number * limit // len(own))
    yield from _read_all((pair for pair in sources if pair[1].held_out), config)


def held_out_share(config: Config, source: Source) -> float:
    """The share of a training source that is held out by content; 0 for the built-in text, which holds out modules."""
    return 0.0 if config.data.eval or source.path.startswith("builtin:") else config.data.eval_fraction


def builtin_share(config: Config) -> float:
    """The share of the built-in text's modules that training leaves out, because the evaluation uses them."""
    data = config.data
    evaluated = not data.eval or any(source.path == STDLIB_DOCS for source in as_sources(data.eval))
    return data.eval_fraction if evaluated else 0.0


def is_held_out(row: Row, config: Config) -> bool:
    """Whether a row of a stream belongs to the evaluation, if its source is held out by content."""
    return content_key(row) < config.data.eval_fraction * KEYS


# --- which rows are trained on and which are held out ----------------------------------------------------------------


def divide(store: Store, table: RowTable, config: Config) -> tuple[Documents, Documents]:
    """Splits the documents into training and evaluation."""
    sources = list_sources(config)
    held_out_sources = np.array([source.held_out for source in sources])
    held_out = held_out_sources[table.source]
    if not config.data.eval:
        builtin = np.array([source.path.startswith("builtin:") for source in sources])
        usable = table.document >= 0  # a dropped row cannot be used for evaluation
        own = np.flatnonzero(~held_out & ~builtin[table.source] & usable)
        picked = pick_held_out(table.key[own], config.data.eval_fraction, config.data.max_eval_rows)
        if config.data.max_eval_rows is not None:
            room = config.data.max_eval_rows - int(picked.sum())
            held_out = held_out & (np.cumsum(held_out) <= room)
        held_out[own[picked]] = True
    training = ~held_out & ~held_out_sources[table.source]
    train = _documents("train", store, table, np.flatnonzero(training), config)
    return train, _documents("eval", store, table, np.flatnonzero(held_out), config)


def pick_held_out(keys: np.ndarray, share: float, limit: int | None) -> np.ndarray:
    """[rows] bool, true for `share` of them (at least one, if there are two different ones), chosen by content hash.

    Rows with the same content stay together: a copy in the training data would make the evaluation worthless. So more
    rows than `share` or `limit` may be chosen, and none if all have the same content.
    """
    different, counts = np.unique(keys, return_counts=True)
    if share <= 0 or len(different) < 2:
        return np.zeros(len(keys), dtype=bool)
    wanted = max(1, round(len(keys) * share))
    if limit is not None:
        wanted = min(wanted, limit)
    enough = int(np.searchsorted(np.cumsum(counts), wanted)) + 1
    return np.isin(keys, different[: min(enough, len(different) - 1)])


def _documents(name: str, store: Store, table: RowTable, rows: np.ndarray, config: Config) -> Documents:
    sources = list_sources(config)
    kept = rows[table.document[rows] >= 0]
    docs = Selection(store, table.document[kept])
    of_source = table.source[kept]
    mixture = Mixture(settings_for(name, sources), of_source, table.key[kept])
    order = epoch_documents(mixture, epoch=0, seed=config.train.seed, shuffle=config.data.shuffle)
    chosen = set(rows.tolist())
    report = SplitReport(
        name,
        rows_read=len(rows),
        rows_kept=len(kept),
        dropped={
            reason: ids for reason, pairs in table.dropped.items() if (ids := [i for row, i in pairs if row in chosen])
        },
        truncated=[docs.name(int(index)) for index in np.flatnonzero(table.truncated[kept])],
        tokens=int(docs.lengths[order].sum()),
        target_tokens=int(table.targets[kept][order].sum()),
        duplicates=len(rows) - len(np.unique(table.key[rows])),
        sources=source_shares(docs, mixture, order, asked=name == "train"),
    )
    return Documents(docs, report, mixture, table.key[rows], table.findings)


def settings_for(name: str, sources: Sequence[Source]) -> list[SourceConfig]:
    """How much of each source a split has. Held-out documents are looked at as they are, whatever the training makes
    of their source."""
    if name == "eval":
        return [SourceConfig(s.path, repeat=s.settings.repeat if s.held_out else 1.0) for s in sources]
    return [SourceConfig(s.path) if s.held_out else s.settings for s in sources]


def source_shares(docs: Selection, mixture: Mixture, order: np.ndarray, *, asked: bool) -> list[SourceShare]:
    """Each source's share, if there are several sources or the only one has a `repeat`."""
    used = [index for index, members in enumerate(mixture.members) if len(members)]
    wanted = mixture.asked()
    if len(used) < 2 and all(source.repeat == 1.0 for source in mixture.settings):
        return []
    of_source, lengths = mixture.of_source[order], docs.lengths[order]
    total = max(int(lengths.sum()), 1)
    return [
        SourceShare(
            mixture.settings[index].path,
            rows=len(mixture.members[index]),
            documents=int((of_source == index).sum()),
            tokens=(tokens := int(lengths[of_source == index].sum())),
            asked=wanted[index] if asked else None,
            got=float((of_source == index).mean()) if len(order) else 0.0,
            token_share=tokens / total,
        )
        for index in used
    ]


# --- what is wrong with them -----------------------------------------------------------------------------------------


def overlap_note(train: Documents, held_out: Documents) -> list[str]:
    """A line when rows of the evaluation are trained on as well."""
    both = int(np.isin(held_out.keys, train.keys).sum())
    if not both:
        return []
    return [
        f"warning: {both:,} of {len(held_out.keys):,} held-out {held_out.report.noun} are word for word in the "
        "training data too; the evaluation loss is too low"
    ]


def trains_end_token(documents: Documents, tokenizer: PreTrainedTokenizerFast) -> bool:
    """Whether a whole document has a special token among its targets, so that the model can learn to stop."""
    special = special_ids(tokenizer)
    cut = set(documents.report.truncated)
    docs = (documents.docs[index] for index in range(min(SAMPLE_DOCS, len(documents.docs))))
    whole = [doc for doc in docs if doc.id not in cut]
    return not whole or any(np.isin(doc.ids[doc.is_target], special).any() for doc in whole)


def check_documents(documents: Documents, *, where: str, seq_len: int) -> None:
    """Raises DataError if no documents are left, or if an epoch would use none of them."""
    report = documents.report
    if len(documents.docs) and not documents.mixture.counts.sum():
        repeats = ", ".join(f"{source.repeat:g} of {source.path}" for source in documents.mixture.settings)
        raise DataError(
            f"an epoch has none of the {len(documents.docs)} conversations: repeat asks for {repeats}",
            where=where,
            hint="raise repeat: it is how often an epoch holds each row",
        )
    if len(documents.docs):
        return
    reasons = "; ".join(f"{len(ids)} {reason}: {some(ids)}" for reason, ids in report.dropped.items())
    raise DataError(
        f"none of the {report.rows_read} conversations can be used: {reasons or 'nothing was read'}",
        where=where,
        hint=f"raise data.seq_len (now {seq_len}), set data.loss_on=all, or look at what the chat template makes of "
        "them",
    )
