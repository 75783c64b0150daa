"""Conversations from files, data set names and the built-in text, whatever their schema, as one kind of row."""

from __future__ import annotations

import gzip
import json
import sys
import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from trainer.config.load import LOCAL_STARTS
from trainer.config.rules import LOCAL_SUFFIXES
from trainer.data.rows.messages import Record, Row, build_row, detect_schema, question_answer, shorten
from trainer.data.rows.stdlib_docs import is_held_out, read_stdlib_pairs
from trainer.errors import DataError
from trainer.files import FileChangedError, OpenFile, expanded, why_unreadable

STDLIB_DOCS = "builtin:stdlib-docs"
TRAIN, HELD_OUT = "train", "test"
"""The two splits of the built-in text."""


def read_conversations(
    spec: str, *, split: str = TRAIN, schema: str = "auto", limit: int | None = None, held_out_share: float = 0.05
) -> Iterator[Row]:
    """The first `limit` conversations of `spec`, in its own order, read as they are asked for.

    `spec`: a .jsonl, .jsonl.gz, .json (list) or .parquet file, a Hugging Face data set (`name` or `name:config`) or a
    folder that `datasets` can load, or `builtin:stdlib-docs`. `split` names a split of data sets and of the built-in
    text, where "test" is `held_out_share` of the modules. Raises DataError for anything that cannot be read.
    """
    if spec.startswith("builtin:"):
        yield from _read_builtin(spec, split, held_out_share)[:limit]
        return
    empty = True
    for row_id, record in islice(read_records(spec, split), limit):
        if schema == "auto":
            schema = detect_schema(record, where=row_id)
        yield build_row(record, schema, row_id=row_id)
        empty = False
    if empty:
        raise DataError(f"{spec} has no rows", where=_shown(spec))


def identify(spec: str, split: str) -> list[Any]:
    """What changes when `spec` holds something else: path, size and time of its files, or the data set's own mark."""
    if spec.startswith("builtin:"):
        return [spec, split, sys.version]
    if not is_local(spec):
        return [spec, split, _load_dataset(spec, split)._fingerprint]
    path = expanded(spec)
    files = sorted(entry for entry in path.rglob("*") if entry.is_file()) if path.is_dir() else [path]
    return [spec, split, *(_identify_file(entry) for entry in files)]


def _identify_file(path: Path) -> list[Any]:
    try:
        found = path.stat()
    except OSError:
        raise DataError(f"there is no file {path.absolute()}", hint="check data.train and data.eval") from None
    return [str(path.absolute()), found.st_size, found.st_mtime_ns]


# --- where records come from -----------------------------------------------------------------------------------------


def is_local(spec: str) -> bool:
    """Whether `spec` can only mean a file or folder of this machine, never the name of a data set."""
    return spec.startswith(LOCAL_STARTS) or spec.endswith(LOCAL_SUFFIXES) or Path(spec).exists()


def _shown(spec: str) -> str:
    return str(expanded(spec).absolute()) if is_local(spec) else spec


def read_records(spec: str, split: str) -> Iterator[tuple[str, Record]]:
    """(id, row) of each row of a .jsonl, .jsonl.gz, .json or .parquet file or of a data set, read when asked for."""
    if not is_local(spec):
        return _read_dataset(spec, split)
    path = expanded(spec)
    if not path.exists():
        raise DataError(f"there is no file {path.absolute()}", hint="check data.train and data.eval")
    if path.is_dir():
        return _read_dataset(str(path), split)
    if spec.endswith(".parquet"):
        return _read_parquet(path, spec)
    if spec.endswith((".json", ".json.gz")):
        return _read_json_list(path, spec)
    if spec.endswith((".jsonl", ".jsonl.gz")):
        return _read_json_lines(path, spec)
    raise DataError(f"{path.absolute()} is no kind of file that can be read", hint="use .jsonl, .json or .parquet")


def _read_json_lines(path: Path, spec: str) -> Iterator[tuple[str, Record]]:
    for number, line in enumerate(_read_lines(path), start=1):
        if line.strip():
            yield f"{spec}:{number}", _record(_parse_json(line, f"{spec}:{number}"), f"{spec}:{number}")


def _read_lines(path: Path) -> Iterator[bytes]:
    try:
        file = OpenFile(path)
        stream = file.stream()
        for line in gzip.GzipFile(fileobj=stream) if path.suffix == ".gz" else stream:
            if not line.endswith(b"\n"):  # the last one, or cut
                file.check()
            yield line
        file.check()
    except (EOFError, zlib.error) as error:
        raise DataError(f"{path.absolute()} cannot be read: {error}") from None
    except OSError as error:
        raise DataError(f"{path.absolute()} {why_unreadable(error)}") from None


def _read_json_list(path: Path, spec: str) -> Iterator[tuple[str, Record]]:
    value = _parse_json(b"".join(_read_lines(path)), spec)
    if not isinstance(value, list):
        raise DataError("the file holds no list of rows", where=_shown(spec), hint="one object a line is .jsonl")
    for index, item in enumerate(value):
        yield f"{spec}[{index}]", _record(item, f"{spec}[{index}]")


def _parse_json(data: bytes, where: str) -> Any:
    try:
        return json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8: byte {data[error.start]:#04x} at offset {error.start}", where=where) from None
    except json.JSONDecodeError as error:
        place = f"{where}:{error.lineno}" if b"\n" in data.rstrip() else where
        raise DataError(f"not JSON: {error.msg} at column {error.colno}", where=place) from None
    except (ValueError, RecursionError) as error:  # a number or a nesting beyond Python's limits
        raise DataError(f"not readable JSON: {error}", where=where) from None


def _record(value: Any, where: str) -> Record:
    if not isinstance(value, dict):
        raise DataError(f"the row is {shorten(value)}, not an object", where=where)
    return value


def _read_parquet(path: Path, spec: str) -> Iterator[tuple[str, Record]]:
    import pyarrow
    import pyarrow.parquet

    try:
        opened = OpenFile(path)
        index = 0
        try:
            with pyarrow.parquet.ParquetFile(path) as file:
                for part in file.iter_batches():
                    for record in part.to_pylist():
                        yield f"{spec}[{index}]", record
                        index += 1
        except (pyarrow.ArrowException, OSError):
            opened.check()
            raise
        opened.check()
    except FileChangedError as error:
        raise DataError(f"{path.absolute()} {why_unreadable(error)}") from None
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"not a readable Parquet file: {error}", where=_shown(spec)) from None


def _read_dataset(spec: str, split: str) -> Iterator[tuple[str, Record]]:
    for index, record in enumerate(_load_dataset(spec, split)):
        yield f"{spec}[{index}]", record


def _load_dataset(spec: str, split: str) -> Any:
    import datasets

    name, _, config = spec.partition(":")
    try:
        return datasets.load_dataset(name, config or None, split=split, trust_remote_code=False)
    except Exception as error:  # the library raises its own, the hub client's, OSError and ValueError alike
        raise DataError(
            f"the data set {spec!r} (split {split!r}) cannot be loaded: {_first_line(error)}",
            hint="without internet use a file; a configuration is written as name:config; "
            "splits are data.train_split and data.eval_split",
        ) from error


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _read_builtin(spec: str, split: str, held_out_share: float) -> list[Row]:
    if spec != STDLIB_DOCS:
        raise DataError(f"there is no {spec}", hint=f"the one built-in text is {STDLIB_DOCS}")
    rows = [
        Row(f"{spec}[{pair.name}]", question_answer(pair.question, pair.answer))
        for pair in read_stdlib_pairs()
        if is_held_out(pair.module, held_out_share) == (split != TRAIN)
    ]
    if not rows:
        raise DataError(
            f"{spec} has no rows for the split {split!r} with {held_out_share:.0%} of its modules held out",
            hint="change data.eval_fraction",
        )
    return rows
