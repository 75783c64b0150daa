"""Reads plain texts for pretraining lazily, and writes them as token files.

Every document is tokenized as plain text, with the tokenizer's end-of-text token after it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from io import TextIOWrapper
from itertools import chain, groupby, islice
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.config.data import TEXT_SUFFIXES
from trainer.console import shown
from trainer.data.rows.findings import COLUMN, Finding, Findings, Remark, render_findings
from trainer.data.rows.sources import STDLIB_DOCS, TRAIN, read_records
from trainer.data.rows.stdlib_docs import read_stdlib_pairs
from trainer.data.tokenize.chat import Encoded
from trainer.data.tokenize.encode import Workers
from trainer.data.tokenize.token_writer import TokenWriter
from trainer.data.tokenize.tokenizer import vocab_size, vocabulary_hash
from trainer.errors import DataError
from trainer.files import OpenFile, expanded, why_unreadable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TEXT_KEY = "text"
CHUNK_TEXTS = 64  # per task of a tokenizing process
CHUNK_CHARS = 1 << 20  # begins a new task: Ctrl-C waits for the one that runs, and memory holds several

Tell = Callable[[int, int], None]
"""Called as documents are written: (documents, tokens) so far."""


@dataclass(frozen=True)
class Text:
    """One document, named by its place in the source; `remarks`: the parts of its row that are not read."""

    id: str
    text: str
    remarks: tuple[Remark, ...] = ()


def read_texts(spec: str, *, split: str = TRAIN, limit: int | None = None) -> Iterator[Text]:
    """The first `limit` documents of `spec`, in its own order.

    `spec`: a .txt or .md file, or a folder of them at any depth (a document each); a file or data set as
    `trainer.data.rows.sources.read_records` takes it, with a column `text` (a document a row);
    or `builtin:stdlib-docs`. Raises DataError for anything that cannot be read, and if there is no document.
    """
    found = 0
    for text in islice(_read(spec, split), limit):
        found += 1
        yield text
    if not found:
        raise DataError(f"{spec} has no documents", hint="name .txt or .md files, or rows with a column 'text'")


def _read(spec: str, split: str) -> Iterator[Text]:
    path = expanded(spec)
    if spec.startswith("builtin:"):
        return _read_builtin(spec)
    if path.is_dir() and (files := _text_files(path)):
        return (_read_file(file, shown(f"{spec.rstrip('/')}/{file.relative_to(path).as_posix()}")) for file in files)
    if spec.endswith(TEXT_SUFFIXES):
        return iter([_read_file(path, spec)])
    return _read_rows(spec, split)


def _text_files(folder: Path) -> list[Path]:
    """The text files at any depth, in an order that depends only on their names."""
    return sorted(path for path in folder.rglob("*") if path.suffix in TEXT_SUFFIXES and path.is_file())


def _read_file(path: Path, name: str) -> Text:
    try:
        file = OpenFile(path)
        with TextIOWrapper(file.stream(), encoding="utf-8-sig") as stream:
            text = stream.read()
        file.check()
        return Text(name, text)
    except UnicodeDecodeError as error:
        bad = f"byte {error.object[error.start]:#04x} at offset {error.start}"
        raise DataError(f"not UTF-8: {bad}", where=str(path.absolute()), hint="convert it to UTF-8") from None
    except OSError as error:
        raise DataError(f"{path.absolute()} {why_unreadable(error)}") from None


def _read_rows(spec: str, split: str) -> Iterator[Text]:
    for row_id, record in read_records(spec, split):
        text = record.get(TEXT_KEY)
        if not isinstance(text, str):
            has = f"its keys are {', '.join(map(repr, record))}" if TEXT_KEY not in record else f"it is {text!r:.80}"
            raise DataError(f"the row has no text in {TEXT_KEY!r}: {has}", where=row_id, hint=f"name it {TEXT_KEY!r}")
        yield Text(row_id, text, _unread_columns(tuple(record)))


@lru_cache(maxsize=256)
def _unread_columns(columns: tuple[str, ...]) -> tuple[Remark, ...]:
    return tuple((COLUMN, repr(name)) for name in columns if name != TEXT_KEY)


def _read_builtin(spec: str) -> Iterator[Text]:
    """The docstrings of Python's standard library, a document for each module."""
    if spec != STDLIB_DOCS:
        raise DataError(f"there is no {spec}", hint=f"the one built-in text is {STDLIB_DOCS}")
    by_module = sorted(read_stdlib_pairs(), key=attrgetter("module", "name"))
    for module, pairs in groupby(by_module, key=attrgetter("module")):
        yield Text(f"{spec}[{module}]", "\n\n".join(f"{pair.name}\n{pair.answer}" for pair in pairs))


@dataclass
class TokenizingReport:
    """A report on a new token file. `bytes_per_token` counts the texts' UTF-8, without end-of-text tokens."""

    path: str
    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    empty: list[str] = field(default_factory=list)
    """Names of documents without tokens, which are left out."""
    findings: list[Finding] = field(default_factory=list)
    """The parts of the rows that are in no document."""
    dtype: str = ""
    seconds: float = 0.0

    @property
    def bytes_per_token(self) -> float:
        return self.text_bytes / max(1, self.tokens - self.documents)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "empty": len(self.empty), "bytes_per_token": round(self.bytes_per_token, 4)}

    def render(self) -> list[str]:
        """The report as a few lines of text."""
        rate = self.tokens / max(self.seconds, 1e-9)
        lines = [
            f"{self.path}: {self.documents:,} documents, {self.tokens:,} tokens ({self.dtype}), "
            f"{self.bytes_per_token:.2f} bytes per token, {self.seconds:.1f} s ({rate:,.0f} tokens/s)"
        ]
        if self.empty:
            lines.append(f"{len(self.empty):,} empty documents left out, the first is {self.empty[0]}")
        return lines + render_findings(self.findings)


def write_token_file(
    path: Path,
    texts: Iterable[Text],
    tokenizer: PreTrainedTokenizerFast,
    *,
    workers: int = 0,
    meta: dict[str, Any] | None = None,
    tell: Tell = lambda documents, tokens: None,
) -> TokenizingReport:
    """Tokenize `texts` in order into the token file `path`; memory does not grow with them.

    Raises DataError when a text or the file's folder cannot be used, or when the tokenizer has no end-of-text token.
    """
    started = time.perf_counter()
    if tokenizer.eos_token_id is None:
        name = tokenizer.name_or_path or type(tokenizer).__name__
        raise DataError(f"the tokenizer {name!r} has no end-of-text token", hint="set its eos_token")
    report = TokenizingReport(str(path))
    findings = Findings()
    meta = {} if meta is None else meta
    vocab, by = vocab_size(tokenizer), vocabulary_hash(tokenizer)
    with TokenWriter(path, vocab_size=vocab, tokenizer=by, has_targets=False, meta=meta) as writer:
        for name, ids, size in encode_texts(_counted(texts, findings), tokenizer, workers=workers):
            if size == 0 or len(ids) <= 1:
                report.empty.append(name)
                continue
            writer.add(Encoded(name, ids, np.ones(len(ids), dtype=bool)))
            report.documents += 1
            report.tokens += len(ids)
            report.text_bytes += size
            tell(report.documents, report.tokens)
        report.dtype, report.findings = writer.dtype, findings.list()
        if report.findings:
            meta["findings"] = [asdict(one) for one in report.findings]  # written into the header, at the end
    report.seconds = time.perf_counter() - started
    return report


def _counted(texts: Iterable[Text], findings: Findings) -> Iterator[Text]:
    for text in texts:
        findings.add(text.remarks, text.id)
        yield text


def read_all_texts(sources: Sequence[str], *, split: str) -> Iterator[Text]:
    """The documents of all sources, one source after another."""
    for source in sources:
        yield from read_texts(source, split=split)


# --- tokens ----------------------------------------------------------------------------------------------------------

Tokens = tuple[str, np.ndarray, int]
"""A document's name, its ids [T] int32 with the end-of-text token, and the bytes of its text."""


def encode_texts(texts: Iterable[Text], tokenizer: PreTrainedTokenizerFast, *, workers: int) -> Iterator[Tokens]:
    """Every text as tokens, in order; by `workers` processes, or by this process if that is 0."""
    parts = cut_texts(texts)
    if workers == 0:
        return (tokens for part in parts for tokens in encode_chunk(part, tokenizer))
    return _encode_in_processes(parts, tokenizer, workers)


def encode_chunk(texts: Sequence[Text], tokenizer: PreTrainedTokenizerFast) -> list[Tokens]:
    """Encodes special tokens in the texts as ordinary text, so that a text cannot contain the end of a document."""
    out = tokenizer(
        [text.text for text in texts], split_special_tokens=True, return_attention_mask=False, verbose=False
    )
    return [
        (text.id, _with_end(ids, tokenizer.eos_token_id), len(text.text.encode(errors="replace")))
        for text, ids in zip(texts, out["input_ids"], strict=True)
    ]


def _with_end(ids: Sequence[int], eos: int) -> np.ndarray:
    """`ids` and the end-of-text token, unless the tokenizer has already added it."""
    return np.asarray(ids if ids and ids[-1] == eos else [*ids, eos], dtype=np.int32)


def cut_texts(texts: Iterable[Text]) -> Iterator[list[Text]]:
    """The texts in order, as tasks of CHUNK_TEXTS texts and CHUNK_CHARS characters at most, one text at least."""
    chunk: list[Text] = []
    chars = 0
    for text in texts:
        if len(chunk) == CHUNK_TEXTS or (chunk and chars + len(text.text) > CHUNK_CHARS):
            yield chunk
            chunk, chars = [], 0
        chunk.append(text)
        chars += len(text.text)
    if chunk:
        yield chunk


def _encode_in_processes(
    parts: Iterator[list[Text]], tokenizer: PreTrainedTokenizerFast, count: int
) -> Iterator[Tokens]:
    workers = Workers(partial(encode_chunk, tokenizer=tokenizer), count)
    try:
        yield from chain.from_iterable(workers.map(parts))
    finally:
        workers.close()
