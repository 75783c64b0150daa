"""Plain texts for pretraining, from files, folders, data sets and the built-in text, read as they are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, islice
from operator import attrgetter
from pathlib import Path

from trainer.config.data import TEXT_SUFFIXES
from trainer.data.rows.sources import STDLIB_DOCS, TRAIN, read_records
from trainer.data.rows.stdlib_docs import read_stdlib_pairs
from trainer.errors import DataError
from trainer.files import expanded

TEXT_KEY = "text"


@dataclass(frozen=True)
class Text:
    """One document, named by its place in the source."""

    id: str
    text: str


def read_texts(spec: str, *, split: str = TRAIN, limit: int | None = None) -> Iterator[Text]:
    """The first `limit` documents of `spec`, in its own order.

    `spec`: a .txt or .md file, or a folder of them at any depth (a document each); a file or data set as
    `trainer.data.rows.sources.read_records` takes it, with a column `text` (a document a row);
    or `builtin:stdlib-docs`. Raises DataError for anything that cannot be read, and where there is no document at all.
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
        return (_read_file(file, f"{spec.rstrip('/')}/{file.relative_to(path).as_posix()}") for file in files)
    if spec.endswith(TEXT_SUFFIXES):
        return iter([_read_file(path, spec)])
    return _read_rows(spec, split)


def _text_files(folder: Path) -> list[Path]:
    """In an order that the names alone decide."""
    return sorted(path for path in folder.rglob("*") if path.suffix in TEXT_SUFFIXES and path.is_file())


def _read_file(path: Path, name: str) -> Text:
    try:
        return Text(name, path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        bad = f"byte {error.object[error.start]:#04x} at offset {error.start}"
        raise DataError(f"not UTF-8: {bad}", where=str(path.absolute()), hint="convert it to UTF-8") from None
    except OSError as error:
        raise DataError(f"{path.absolute()} cannot be read: {error.strerror}") from None


def _read_rows(spec: str, split: str) -> Iterator[Text]:
    for row_id, record in read_records(spec, split):
        text = record.get(TEXT_KEY)
        if not isinstance(text, str):
            has = f"its keys are {', '.join(map(repr, record))}" if TEXT_KEY not in record else f"it is {text!r:.80}"
            raise DataError(f"the row has no text in {TEXT_KEY!r}: {has}", where=row_id, hint=f"name it {TEXT_KEY!r}")
        yield Text(row_id, text)


def _read_builtin(spec: str) -> Iterator[Text]:
    """The docstrings of Python's standard library, a document for each module."""
    if spec != STDLIB_DOCS:
        raise DataError(f"there is no {spec}", hint=f"the one built-in text is {STDLIB_DOCS}")
    by_module = sorted(read_stdlib_pairs(), key=attrgetter("module", "name"))
    for module, pairs in groupby(by_module, key=attrgetter("module")):
        yield Text(f"{spec}[{module}]", "\n\n".join(f"{pair.name}\n{pair.answer}" for pair in pairs))
