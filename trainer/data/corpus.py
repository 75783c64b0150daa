"""The documents for pretraining: existing token files, and texts, which first become token files in the run folder."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trainer.config.data import is_token_file
from trainer.console import write_line
from trainer.data.dataset.cache import TELL_EVERY_S, TOKENS_DIR, on_each_storage
from trainer.data.dataset.documents import Documents, Source, overlap_note, pick_held_out, settings_for, source_shares
from trainer.data.dataset.order import Mixture, epoch_documents
from trainer.data.dataset.report import SplitReport
from trainer.data.dataset.store import NO_TARGET, PieceStore, Selection
from trainer.data.loader import Data, TrainLoader, lay_out
from trainer.data.rows.findings import Findings, parse_findings
from trainer.data.rows.sources import identify
from trainer.data.tokenize.plain_text import Tell, read_texts, write_token_file
from trainer.data.tokenize.token_file import SUFFIX, TokenFile
from trainer.data.tokenize.tokenizer import vocabulary_hash
from trainer.dist import Dist
from trainer.errors import DataError
from trainer.files import expanded
from trainer.schema import Config, as_sources

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def build_corpus(
    config: Config, dist: Dist, tokenizer: PreTrainedTokenizerFast, *, run_dir: Path, model_vocab: int
) -> Data:
    """Opens the token files, tokenizes texts if not done yet, and lays out all documents. Every rank must call this.

    `model_vocab`: rows of the model's embedding. Raises DataError when something cannot be read, when a token file was
    made for another tokenizer or model, or when nothing is left to train on.
    """
    started = time.perf_counter()
    sources = list_corpus(config)
    files = open_corpus(config, sources, tokenizer, dist, run_dir / TOKENS_DIR)
    for file in files:
        file.check(vocab_size=model_vocab, tokenizer=vocabulary_hash(tokenizer))
    store = PieceStore(files, seq_len=config.data.seq_len)
    table = read_table(files, sources)
    chosen, held_out_docs = divide_corpus(table, config)
    documents = select_pieces("train", store, table, chosen, config)
    held_out = select_pieces("eval", store, table, held_out_docs, config)
    _check_not_empty(documents, "data.train")
    if config.data.eval:
        _check_not_empty(held_out, "data.eval")
    pad_id = tokenizer.pad_token_id or 0  # never read: padding is recognized by position
    train = TrainLoader(documents, config=config, ranks=dist, pad_id=pad_id)
    notes = overlap_note(documents, held_out)
    data = lay_out(
        train, documents.report, held_out, config=config, ranks=dist, pad_id=pad_id, started=started, notes=notes
    )
    told = Findings(one for file in files for one in parse_findings(file.header.meta.get("findings", []), file.path))
    data.report.findings.extend(told.list())
    return data


def list_corpus(config: Config) -> list[Source]:
    """All sources in order: those for training, then those only for evaluation."""
    data = config.data
    return [
        *(Source(entry, data.train_split, False) for entry in as_sources(data.train)),
        *(Source(entry, data.eval_split, True) for entry in as_sources(data.eval)),
    ]


# --- token files -----------------------------------------------------------------------------------------------------


def open_corpus(
    config: Config, sources: Sequence[Source], tokenizer: PreTrainedTokenizerFast, dist: Dist, folder: Path
) -> list[TokenFile]:
    """A token file for each source; those of texts are in `folder`, made by the first rank on each
    storage, or found there."""
    paths = [_token_path(number, source, folder) for number, source in enumerate(sources)]
    tell = _progress if dist.is_main and sys.stderr.isatty() else _silent

    def make() -> None:
        for source, path in zip(sources, paths, strict=True):
            if not is_token_file(source.path):
                _tokenize(source, path, tokenizer, workers=config.data.workers, tell=tell(source.path))

    on_each_storage(dist, make)
    return [TokenFile.open(path) for path in paths]


def _token_path(number: int, source: Source, folder: Path) -> Path:
    return expanded(source.path) if is_token_file(source.path) else folder / f"text-{number}{SUFFIX}"


def _tokenize(source: Source, path: Path, tokenizer: PreTrainedTokenizerFast, *, workers: int, tell: Tell) -> None:
    mark = _identity(source, tokenizer)
    if _is_made(path, mark):
        return
    texts = read_texts(source.path, split=source.split, limit=source.settings.limit)
    meta = {"sources": [source.path], "identity": mark}
    write_token_file(path, texts, tokenizer, workers=workers, meta=meta, tell=tell)
    if _identity(source, tokenizer) != mark:
        path.unlink()
        raise DataError(f"{source.path} was changed while it was read", hint="start again when it is at rest")


def _identity(source: Source, tokenizer: PreTrainedTokenizerFast) -> str:
    """16 hex digits that change with anything that changes the tokens."""
    made_by = [vocabulary_hash(tokenizer), tokenizer.eos_token]
    parts = [identify(source.path, source.split), source.settings.limit, made_by]
    return hashlib.blake2b(json.dumps(parts, default=str).encode(), digest_size=8).hexdigest()


def _is_made(path: Path, mark: str) -> bool:
    try:
        return path.is_file() and TokenFile.open(path).header.meta.get("identity") == mark
    except DataError:  # of another version, or damaged: it is made again
        return False


def _silent(path: str) -> Tell:
    return lambda documents, tokens: None


def _progress(path: str) -> Tell:
    """A line on stderr every few seconds."""
    told = time.monotonic()

    def tell(documents: int, tokens: int) -> None:
        nonlocal told
        if time.monotonic() - told >= TELL_EVERY_S:
            told = time.monotonic()
            write_line(sys.stderr, f"tokenizing {path}: {documents:,} documents, {tokens:,} tokens")

    return tell


# --- which documents are trained on and which are held out -----------------------------------------------------------


@dataclass(frozen=True)
class DocumentTable:
    """Every document of all files, in order; all arrays are [docs]."""

    sources: Sequence[Source]
    source: np.ndarray
    """uint16, its number among the sources."""
    place: np.ndarray
    """int64, its number in its source."""
    key: np.ndarray
    """uint64, a hash of its content."""
    length: np.ndarray
    """int64, tokens."""
    name: Callable[[int], str]


def read_table(files: Sequence[TokenFile], sources: Sequence[Source]) -> DocumentTable:
    counts = [len(file) for file in files]
    source = np.repeat(np.arange(len(files), dtype=np.uint16), counts)
    place = np.concatenate([np.arange(count) for count in counts])
    return DocumentTable(
        sources,
        source,
        place,
        np.concatenate([file.keys for file in files]),
        np.concatenate([file.lengths for file in files]),
        lambda index: files[source[index]].name(int(place[index])),
    )


def divide_corpus(table: DocumentTable, config: Config) -> tuple[np.ndarray, np.ndarray]:
    """The documents of training and of evaluation, as indices into the table."""
    data = config.data
    room = [np.iinfo(np.int64).max if (limit := s.settings.limit) is None else limit for s in table.sources]
    allowed = table.place < np.array(room, dtype=np.int64)[table.source]
    for_eval = np.array([source.held_out for source in table.sources])[table.source]
    train = np.flatnonzero(allowed & ~for_eval)[: data.max_train_rows]
    if data.eval:
        return train, np.flatnonzero(allowed & for_eval)[: data.max_eval_rows]
    held_out = pick_held_out(table.key[train], data.eval_fraction, data.max_eval_rows)
    return train[~held_out], train[held_out]


def select_pieces(name: str, store: PieceStore, table: DocumentTable, docs: np.ndarray, config: Config) -> Documents:
    """The pieces of the documents `docs`, with a report of them."""
    chosen = np.zeros(len(table.length), dtype=bool)
    chosen[docs] = True
    indices = np.flatnonzero(chosen[store.pieces.document])
    of_piece = store.pieces.document[indices]
    mixture = Mixture(settings_for(name, table.sources), table.source[of_piece], table.key[of_piece])
    selection = Selection(store, indices)
    order = epoch_documents(mixture, epoch=0, seed=config.train.seed, shuffle=config.data.shuffle)
    too_short = docs[table.length[docs] < 2]
    report = SplitReport(
        name,
        noun="documents",
        part="pieces",
        rows_read=len(docs),
        rows_kept=len(docs) - len(too_short),
        dropped={NO_TARGET: [table.name(int(index)) for index in too_short]} if len(too_short) else {},
        tokens=int(selection.lengths[order].sum()),
        target_tokens=_count_targets(store, indices[order]),
        duplicates=len(docs) - len(np.unique(table.key[docs])),
        sources=source_shares(selection, mixture, order, asked=name == "train"),
    )
    return Documents(selection, report, mixture, table.key[docs])


def _count_targets(store: PieceStore, indices: np.ndarray) -> int:
    if store.all_targets:
        return int((store.lengths[indices] - 1).sum())
    return sum(store[int(index)].num_targets for index in indices)


def _check_not_empty(documents: Documents, key: str) -> None:
    if not documents.report.target_tokens:
        read = documents.report.rows_read
        raise DataError(f"none of the {read:,} documents has a token to predict", where=key, hint="name other sources")
