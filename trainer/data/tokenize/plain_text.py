"""Texts become token files: every document tokenized as plain text, with the tokenizer's end-of-text token after it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.data.rows.texts import Text, read_texts
from trainer.data.tokenize.chat import Encoded
from trainer.data.tokenize.token_writer import TokenWriter
from trainer.data.tokenize.tokenizer import vocab_size, vocabulary_hash
from trainer.data.tokenize.workers import Workers
from trainer.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CHUNK_TEXTS = 64  # per task of a tokenizing process
CHUNK_CHARS = 1 << 20  # begins a new task: Ctrl-C waits for the one that runs, and memory holds several

Tell = Callable[[int, int], None]
"""Called as documents are written: (documents, tokens) so far."""


@dataclass
class TokenizingReport:
    """What a token file was made of. `bytes_per_token` counts the texts' UTF-8, without end-of-text tokens."""

    path: str
    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    empty: list[str] = field(default_factory=list)
    """Names of documents without a token, which are left out."""
    dtype: str = ""
    seconds: float = 0.0

    @property
    def bytes_per_token(self) -> float:
        return self.text_bytes / max(1, self.tokens - self.documents)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "empty": len(self.empty), "bytes_per_token": round(self.bytes_per_token, 4)}

    def render(self) -> list[str]:
        """A few lines for people."""
        rate = self.tokens / max(self.seconds, 1e-9)
        lines = [
            f"{self.path}: {self.documents:,} documents, {self.tokens:,} tokens ({self.dtype}), "
            f"{self.bytes_per_token:.2f} bytes per token, {self.seconds:.1f} s ({rate:,.0f} tokens/s)"
        ]
        if self.empty:
            lines.append(f"{len(self.empty):,} empty documents left out, the first is {self.empty[0]}")
        return lines


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
    vocab, by = vocab_size(tokenizer), vocabulary_hash(tokenizer)
    with TokenWriter(path, vocab_size=vocab, tokenizer=by, has_targets=False, meta=meta) as writer:
        for name, ids, size in encode_texts(texts, tokenizer, workers=workers):
            if size == 0 or len(ids) <= 1:
                report.empty.append(name)
                continue
            writer.add(Encoded(name, ids, np.ones(len(ids), dtype=bool)))
            report.documents += 1
            report.tokens += len(ids)
            report.text_bytes += size
            tell(report.documents, report.tokens)
        report.dtype = writer.dtype
    report.seconds = time.perf_counter() - started
    return report


def read_all_texts(sources: Sequence[str], *, split: str) -> Iterator[Text]:
    """The documents of all sources, one source after another."""
    for source in sources:
        yield from read_texts(source, split=split)


# --- tokens ----------------------------------------------------------------------------------------------------------

Tokens = tuple[str, np.ndarray, int]
"""A document's name, its ids [T] int32 with the end-of-text token, and the bytes of its text."""


def encode_texts(texts: Iterable[Text], tokenizer: PreTrainedTokenizerFast, *, workers: int) -> Iterator[Tokens]:
    """Every text as tokens, in order; by `workers` processes, or by this one when that is 0."""
    parts = cut_texts(texts)
    if workers == 0:
        return (tokens for part in parts for tokens in encode_chunk(part, tokenizer))
    return _encode_in_processes(parts, tokenizer, workers)


def encode_chunk(texts: Sequence[Text], tokenizer: PreTrainedTokenizerFast) -> list[Tokens]:
    """Text is text: what looks like a special token in it becomes ordinary tokens, so nobody's page ends a document."""
    out = tokenizer(
        [text.text for text in texts], split_special_tokens=True, return_attention_mask=False, verbose=False
    )
    return [
        (text.id, _with_end(ids, tokenizer.eos_token_id), len(text.text.encode(errors="replace")))
        for text, ids in zip(texts, out["input_ids"], strict=True)
    ]


def _with_end(ids: Sequence[int], eos: int) -> np.ndarray:
    """`ids` and the end-of-text token, unless the tokenizer puts it there itself."""
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
