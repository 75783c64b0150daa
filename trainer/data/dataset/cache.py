"""Tokenizes rows once per run folder into `RUN/tokens/`; every rank reads the file, and a restart reuses it."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as torch_dist

from trainer.console import write_line
from trainer.data.dataset.documents import list_sources, read_rows
from trainer.data.dataset.store import ANEW, ListStore, RowTable, Store, collect
from trainer.data.rows.findings import Finding
from trainer.data.rows.sources import identify
from trainer.data.tokenize.encode import EncodedRow, encode_rows
from trainer.data.tokenize.token_file import TokenFile
from trainer.data.tokenize.token_writer import TokenWriter
from trainer.data.tokenize.tokenizer import tokenizer_hash, vocab_size
from trainer.dist import Dist, DistError, gather
from trainer.errors import DataError, UserError
from trainer.schema import Config
from trainer.typed import Count, InvalidData, from_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TOKENS_DIR = "tokens"
ROWS_FILE = "rows.npz"
TOKENS_FILE = "rows.tokens"
TELL_EVERY_S = 5.0
WAIT_S = 2.0

OPTIONS = (
    *("schema", "system_prompt", "loss_on", "seq_len", "overlong", "max_train_rows", "max_eval_rows"),
    *("eval_fraction", "turns"),
)
"""Keys of data that change the documents made from the same sources."""


def tokenize_in_memory(config: Config, tokenizer: PreTrainedTokenizerFast) -> tuple[Store, RowTable]:
    """All rows of the config, in this process alone."""
    store = ListStore()
    return store, collect(encode_rows(read_rows(config), tokenizer, config.data), store, config.data)


def tokenize_in_run(
    config: Config, tokenizer: PreTrainedTokenizerFast, dist: Dist, run_dir: Path
) -> tuple[Store, RowTable]:
    """All rows of the config in token files of the run folder, made by the first rank that sees it, or found there.

    They are made again when a source, the tokenizer, its template or an option has changed. Raises on every rank what
    one of them has met.
    """
    folder = run_dir / TOKENS_DIR
    on_each_storage(dist, lambda: _make(config, tokenizer, folder, tell=dist.is_main and sys.stderr.isatty()))
    return _open(folder)


def identity(config: Config, tokenizer: PreTrainedTokenizerFast) -> str:
    """16 hex digits that change with anything that decides the documents."""
    sources = [
        [*identify(source.path, source.split), source.settings.limit, source.held_out]
        for source in list_sources(config)
    ]
    options = {name: getattr(config.data, name) for name in OPTIONS}
    text = json.dumps([tokenizer_hash(tokenizer), sources, options], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _make(config: Config, tokenizer: PreTrainedTokenizerFast, folder: Path, *, tell: bool) -> None:
    mark = identity(config, tokenizer)
    if _is_made(folder, mark):
        return
    meta: dict[str, Any] = {"identity": mark}
    with TokenWriter(
        folder / TOKENS_FILE,
        vocab_size=vocab_size(tokenizer),
        tokenizer=tokenizer_hash(tokenizer),
        has_targets=True,
        meta=meta,
    ) as writer:
        rows = encode_rows(read_rows(config), tokenizer, config.data)
        table = collect(telling(rows) if tell else rows, writer, config.data)
        if identity(config, tokenizer) != mark:
            raise DataError(
                "a data file was changed while it was read", where="data.train", hint="start again when it is at rest"
            )
        meta |= {"dropped": table.dropped, "findings": [asdict(one) for one in table.findings]}  # written at the end
        _save_rows(table, folder / ROWS_FILE)


def _save_rows(table: RowTable, path: Path) -> None:
    aside = path.with_suffix(f".tmp{os.getpid()}_{time.time_ns()}.npz")
    try:
        table.save(aside)
        aside.replace(path)
    except OSError as error:
        raise DataError(f"{path.absolute()} cannot be written: {error.strerror or error}") from None
    finally:
        aside.unlink(missing_ok=True)


def _is_made(folder: Path, mark: str) -> bool:
    """Whether whole files with that mark are there; missing, damaged or older ones are made again."""
    try:
        tokens = TokenFile.open(folder / TOKENS_FILE)
        if tokens.header.meta.get("identity") != mark:
            return False
        _, table = _open(folder)
    except DataError:
        return False
    return int((table.document >= 0).sum()) == len(tokens)


@dataclass(frozen=True)
class Meta:
    """Extra data in a run's token file: [row, id] of dropped rows by reason, and the findings."""

    dropped: dict[str, tuple[tuple[Count, str], ...]]
    findings: tuple[Finding, ...] = ()


def _open(folder: Path) -> tuple[Store, RowTable]:
    tokens = TokenFile.open(folder / TOKENS_FILE)
    try:
        meta = from_json(tokens.header.meta, Meta)
    except InvalidData as damage:
        raise DataError(f"{folder / TOKENS_FILE}: meta.{damage}", hint=ANEW) from None
    listed = {reason: [list(row) for row in rows] for reason, rows in meta.dropped.items()}
    table = RowTable.load(folder / ROWS_FILE, listed)
    return tokens, replace(table, findings=list(meta.findings))


def telling(rows: Iterable[EncodedRow], *, every_s: float = TELL_EVERY_S) -> Iterator[EncodedRow]:
    """The same rows, with a line on stderr every `every_s` seconds."""
    began = told = time.monotonic()
    tokens = 0
    for number, row in enumerate(rows, start=1):
        yield row
        tokens += len(row.document.ids)
        now = time.monotonic()
        if now - told >= every_s:
            told = now
            rate = number / max(now - began, 1e-9)
            write_line(sys.stderr, f"tokenizing: {number:,} rows, {tokens:,} tokens, {rate:,.0f} rows/s")


# --- the ranks -------------------------------------------------------------------------------------------------------


def on_each_storage(dist: Dist, work: Callable[[], None]) -> None:
    """Does `work` on the first rank of each storage of the run folder while the others wait, however long it takes.

    The error that a rank has met is raised on all: a UserError as it is, anything else elsewhere as a DistError.
    """
    if dist.control_group is None:
        work()
        return
    error: BaseException | None = None
    with ThreadPoolExecutor(1, thread_name_prefix="tokenizing") as pool:
        works = dist.local_rank == 0 if dist.nodes is None else dist.is_keeper
        future = pool.submit(work) if works else None
        # short collectives, so that their timeout does not limit the duration of the work
        while not _all_done(dist, future):
            pass
        error = future.exception() if future is not None else None
    told = error if isinstance(error, UserError) or error is None else DistError(f"rank {dist.rank} failed: {error!r}")
    errors = gather(_portable(told), dist.control_group)
    if error is not None:
        raise error
    first = next((found for found in errors if found is not None), None)
    if first is not None:
        kind, message, extra = first
        raise kind(message, **extra)


def _all_done(dist: Dist, future: Future[None] | None) -> bool:
    if future is not None:
        wait_for([future], timeout=WAIT_S)
    done = torch.tensor([int(future is None or future.done())])
    torch_dist.all_reduce(done, op=torch_dist.ReduceOp.MIN, group=dist.control_group)
    return bool(done.item())


def _portable(error: Exception | None) -> tuple[type[Exception], str, dict[str, Any]] | None:
    if error is None:
        return None
    if isinstance(error, UserError):
        return type(error), error.message, {"where": error.where, "hint": error.hint}
    return type(error), str(error), {}
