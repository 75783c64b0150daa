"""From the config's sources to the documents that are trained on, with an account of all that was left out."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from trainer.data.chat import Encoded, encode, special_ids
from trainer.data.messages import Row
from trainer.data.sources import HELD_OUT, STDLIB_DOCS, TRAIN, read_conversations
from trainer.errors import DataError
from trainer.schema import Config, DataConfig, SourceConfig, as_sources

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SHOWN_IDS = 5
SAMPLE_DOCS = 100
CHUNK_ROWS = 256  # per task of a tokenizing process

NO_TARGET = "no target token"
OVERLONG = "longer than seq_len"


@dataclass
class SplitReport:
    """What became of the rows of one split; `dropped` maps each reason to the ids of its rows."""

    name: str
    rows_read: int = 0
    rows_kept: int = 0
    dropped: dict[str, list[str]] = field(default_factory=dict)
    truncated: list[str] = field(default_factory=list)
    tokens: int = 0
    target_tokens: int = 0
    packed_rows: int = 0
    padding_share: float = 0.0

    def render(self) -> list[str]:
        """A few lines for people."""
        lines = [
            f"{self.name}: {self.rows_kept:,} of {self.rows_read:,} conversations, {self.tokens:,} tokens "
            f"({self.target_tokens:,} targets) in {self.packed_rows:,} rows, "
            f"{self.padding_share:.1%} padding"
        ]
        for reason, ids in self.dropped.items():
            lines.append(f"{self.name}: {len(ids):,} dropped, {reason}: {_some(ids)}")
        if self.truncated:
            lines.append(f"{self.name}: {len(self.truncated):,} cut to seq_len: {_some(self.truncated)}")
        return lines


@dataclass(frozen=True)
class Documents:
    """Documents in reading order, each with at least one target and no longer than seq_len."""

    docs: list[Encoded]
    report: SplitReport

    @property
    def lengths(self) -> list[int]:
        return [len(doc.ids) for doc in self.docs]

    def fingerprint(self) -> str:
        """Changes with any id, token, target or their order."""
        digest = hashlib.sha256()
        for doc in self.docs:
            digest.update(f"{doc.id}\0{len(doc.ids)}\0".encode())
            digest.update(doc.ids.tobytes())
            digest.update(doc.is_target.tobytes())
        return digest.hexdigest()[:16]


def read_rows(config: Config) -> tuple[list[Row], list[Row]]:
    """The training rows and the held-out ones; `data.max_*_rows` conversations of each at most."""
    data = config.data
    share = data.eval_fraction
    train = _read_all(_paths(data.train), data, split=data.train_split, builtin=TRAIN, limit=data.max_train_rows)
    if data.eval:
        return train, _read_all(
            _paths(data.eval), data, split=data.eval_split, builtin=HELD_OUT, limit=data.max_eval_rows
        )
    if share <= 0:
        return train, []
    own = [row for row in train if not row.id.startswith(STDLIB_DOCS)]
    train_ids_out = _pick_held_out(own, share, data.max_eval_rows)
    held_out = [row for row in train if row.id in train_ids_out]
    if STDLIB_DOCS in _paths(data.train):
        room = None if data.max_eval_rows is None else data.max_eval_rows - len(held_out)
        held_out += read_conversations(STDLIB_DOCS, split=HELD_OUT, limit=room, held_out_share=share)
    return [row for row in train if row.id not in train_ids_out], held_out


def _paths(entries: Sequence[str | SourceConfig]) -> list[str]:
    return [source.path for source in as_sources(entries)]


def _read_all(specs: Sequence[str], data: DataConfig, *, split: str, builtin: str, limit: int | None) -> list[Row]:
    rows: list[Row] = []
    for spec in specs:
        room = None if limit is None else limit - len(rows)
        if room == 0:
            break
        rows += read_conversations(
            spec,
            split=builtin if spec.startswith("builtin:") else split,
            schema=data.schema,
            limit=room,
            held_out_share=data.eval_fraction,
        )
    return rows


def _pick_held_out(rows: Sequence[Row], share: float, limit: int | None) -> set[str]:
    """The ids of `share` of the rows (one at least, if two are there), chosen by what they say."""
    count = round(len(rows) * share)
    if len(rows) > 1:
        count = max(count, 1)
    if limit is not None:
        count = min(count, limit)
    by_content = sorted(rows, key=lambda row: (_content_digest(row), row.id))
    return {row.id for row in by_content[:count]}


def _content_digest(row: Row) -> str:
    return hashlib.blake2b(json.dumps(row.messages, sort_keys=True).encode(), digest_size=8).hexdigest()


# --- tokens ----------------------------------------------------------------------------------------------------------


def build_documents(
    rows: Sequence[Row], tokenizer: PreTrainedTokenizerFast, data: DataConfig, *, name: str
) -> Documents:
    """Every row that can be trained on, tokenized; the others are in the report by reason and id."""
    report = SplitReport(name, rows_read=len(rows))
    docs = []
    for encoded in encode_rows(rows, tokenizer, data):
        doc = _keep(encoded, data, report)
        if doc is not None:
            docs.append(doc)
    report.rows_kept = len(docs)
    report.tokens = sum(len(doc.ids) for doc in docs)
    report.target_tokens = sum(doc.num_targets for doc in docs)
    return Documents(docs, report)


def _keep(encoded: Encoded, data: DataConfig, report: SplitReport) -> Encoded | None:
    too_long = len(encoded.ids) > data.seq_len
    if too_long and data.overlong == "drop":
        report.dropped.setdefault(OVERLONG, []).append(encoded.id)
        return None
    doc = encoded.cut(data.seq_len) if too_long else encoded
    if doc.num_targets == 0:
        reason = f"{NO_TARGET} in the first {data.seq_len} tokens" if encoded.num_targets else NO_TARGET
        report.dropped.setdefault(reason, []).append(encoded.id)
        return None
    if too_long:
        report.truncated.append(encoded.id)
    return doc


def trains_end_token(documents: Documents, tokenizer: PreTrainedTokenizerFast) -> bool:
    """Whether a whole document has a special token among its targets, so that the model can learn to stop."""
    special = special_ids(tokenizer)
    cut = set(documents.report.truncated)
    whole = [doc for doc in documents.docs[:SAMPLE_DOCS] if doc.id not in cut]
    return not whole or any(np.isin(doc.ids[doc.is_target], special).any() for doc in whole)


def check_documents(documents: Documents, *, where: str, seq_len: int) -> None:
    """Raises DataError when nothing is left to train on."""
    if documents.docs:
        return
    report = documents.report
    reasons = "; ".join(f"{len(ids)} {reason}: {_some(ids)}" for reason, ids in report.dropped.items())
    raise DataError(
        f"none of the {report.rows_read} conversations can be used: {reasons or 'nothing was read'}",
        where=where,
        hint=f"raise data.seq_len (now {seq_len}), or set data.loss_on=all",
    )


def encode_rows(rows: Sequence[Row], tokenizer: PreTrainedTokenizerFast, data: DataConfig) -> Iterable[Encoded]:
    """Each row encoded, in order; by `data.workers` processes when there are any."""
    one = partial(encode, tokenizer=tokenizer, loss_on=data.loss_on, system_prompt=data.system_prompt)
    if data.workers == 0 or len(rows) <= CHUNK_ROWS:
        return [one(row) for row in rows]
    # spawned, not forked: the training process may have threads and a CUDA context
    with ProcessPoolExecutor(
        data.workers, mp_context=multiprocessing.get_context("spawn"), initializer=_start_worker, initargs=(one,)
    ) as pool:
        return list(pool.map(_encode_in_worker, rows, chunksize=CHUNK_ROWS))


_worker: list[partial[Encoded]] = []  # set once in each tokenizing process


def _start_worker(one: partial[Encoded]) -> None:
    _worker.append(one)


def _encode_in_worker(row: Row) -> Encoded:
    return _worker[0](row)


def _some(ids: Sequence[str]) -> str:
    more = f" and {len(ids) - SHOWN_IDS:,} more" if len(ids) > SHOWN_IDS else ""
    return ", ".join(ids[:SHOWN_IDS]) + more
