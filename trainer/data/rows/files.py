"""Reads the records of one file: JSON lines or a list of rows, CSV or Parquet, plain or compressed."""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from io import BufferedReader
from itertools import chain
from pathlib import Path
from typing import IO, Any, cast

from trainer.config.data import COMPRESSIONS
from trainer.data.rows.messages import Record, shorten
from trainer.errors import DataError
from trainer.files import FileChangedError, OpenFile, why_unreadable
from trainer.schema.data import SCHEMA_KEYS

MAX_LINE = 64 << 20
MAX_WHOLE = 4 << 30
"""The maximum bytes of a line, and of a file that is read as a whole: a list of rows, or an object over several
lines."""
SPLITS = {"train", "test", "validation", "valid", "val", "dev", "eval"}
WHITESPACE = re.compile(r"\s*")
Records = Iterator[tuple[str, Record]]


def read_file(path: Path, spec: str, split: str) -> Records:
    """(id, row) of each row, read lazily. `split`: the split to read if a JSON file has several."""
    kind = Path(path.name.removesuffix(path.suffix)).suffix if path.suffix in COMPRESSIONS else path.suffix
    if kind == ".parquet":
        return _read_parquet(path, spec)
    if kind in (".csv", ".tsv"):
        return _read_csv(path, spec, delimiter="\t" if kind == ".tsv" else None)
    if kind in (".json", ".jsonl", ".ndjson"):
        return _read_json(path, spec, split)
    raise DataError(
        f"{path.absolute()} is no kind of file that can be read",
        hint=f"use .jsonl, .json, .csv, .tsv (also with {', '.join(COMPRESSIONS)}) or .parquet",
    )


# --- bytes -----------------------------------------------------------------------------------------------------------


def _zstd(stream: IO[bytes]) -> IO[bytes]:
    import pyarrow  # it comes with datasets; the standard library has this from Python 3.14 on

    return cast(IO[bytes], BufferedReader(pyarrow.CompressedInputStream(pyarrow.PythonFile(stream, mode="r"), "zstd")))


OPENERS: dict[bytes, Callable[[Any], IO[bytes]]] = {
    b"\x1f\x8b": lambda stream: cast(IO[bytes], gzip.open(stream)),  # noqa: SIM115 - closed with its file
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ\x00": lzma.LZMAFile,
    b"\x28\xb5\x2f\xfd": _zstd,
}
"""By the first bytes of a file; its name does not matter."""
FOREIGN = {
    b"\xff\xfe": ("UTF-16 text", "convert it to UTF-8: iconv -f UTF-16 -t UTF-8 FILE > NEW"),
    b"\xfe\xff": ("UTF-16 text", "convert it to UTF-8: iconv -f UTF-16 -t UTF-8 FILE > NEW"),
    b"PK\x03\x04": ("a zip archive or a spreadsheet", "unpack it, or save it as CSV or JSON lines"),
    b"PAR1": ("a Parquet file", "call it .parquet"),
}


def _read_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, decompressed and without its byte order mark; lines of more than MAX_LINE bytes in pieces.

    Raises DataError that names the file.
    """
    try:
        file = OpenFile(path)
        stream = cast(BufferedReader, file.stream())
        head = stream.peek(8)[:8]
        opened = next((make(stream) for magic, make in OPENERS.items() if head.startswith(magic)), stream)
        first = True
        while line := opened.readline(MAX_LINE + 1):
            if not line.endswith(b"\n"):  # the last line, or a piece of one
                file.check()
            if first:
                _refuse_foreign(line, path)
                line, first = line.removeprefix(b"\xef\xbb\xbf"), False
            yield line
        file.check()
    except (EOFError, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"{path.absolute()} cannot be read: {error}") from None
    except OSError as error:
        raise DataError(f"{path.absolute()} {why_unreadable(error)}") from None


def _refuse_foreign(line: bytes, path: Path) -> None:
    for magic, (what, hint) in FOREIGN.items():
        if line.startswith(magic):
            raise DataError(f"{path.absolute()} is {what}", hint=hint)


def _row(line: bytes, where: str) -> str:
    """The line as text. Raises DataError if it is too long."""
    if len(line) > MAX_LINE:
        raise DataError(f"a line of more than {MAX_LINE >> 20} MiB", where=where, hint="a row is an object a line")
    return _decoded(line, where)


def _decoded(data: bytes, where: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        told = f"not UTF-8: byte {data[error.start]:#04x} at offset {error.start}"
        raise DataError(told, where=where, hint="convert it to UTF-8") from None


# --- JSON ------------------------------------------------------------------------------------------------------------


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        twice = next(key for index, (key, _) in enumerate(pairs) if key in (name for name, _ in pairs[:index]))
        raise ValueError(f"an object has the key {shorten(twice)} twice")
    return made


def _constant(name: str) -> None:
    """Accepts NaN, because pandas writes it for missing values."""
    if name != "NaN":
        raise ValueError(f"it holds {name}, which is no JSON")


DECODER = json.JSONDecoder(object_pairs_hook=_pairs, parse_constant=_constant)


def _read_json(path: Path, spec: str, split: str) -> Records:
    """One object per line, or a list of them, or an object that contains lists. The file's beginning decides, not its
    name."""
    lines = _read_lines(path)
    head = _through_first(lines)
    if not head or not head[-1].strip():
        return
    first = f"{spec}:{len(head)}"
    if head[-1].lstrip()[:1] == b"[":
        yield from _read_whole([*head, *_bounded(lines, path)], spec, split, first)
        return
    if ".json" in path.suffixes[-2:]:
        following = _through_first(lines)
        if not following or not _is_json(head[-1]):  # one object, or objects over several lines
            yield from _read_whole([*head, *following, *_bounded(lines, path)], spec, split, first)
            return
        head += following
    for number, line in enumerate(chain(head, lines), start=1):
        if line.strip():
            place = f"{spec}:{number}"
            yield place, _record(_parse(_row(line.rstrip(), place), place), place)


def _through_first(lines: Iterator[bytes]) -> list[bytes]:
    """The lines up to and including the first that is not blank."""
    read = []
    for line in lines:
        read.append(line)
        if line.strip():
            break
    return read


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _bounded(lines: Iterator[bytes], path: Path) -> Iterator[bytes]:
    size = 0
    for line in lines:
        size += len(line)
        if size > MAX_WHOLE:
            hint = "write one object a line (.jsonl): such a file is read row by row"
            raise DataError(f"{path.absolute()} is one JSON value of more than {MAX_WHOLE >> 30} GiB", hint=hint)
        yield line


def _read_whole(lines: list[bytes], spec: str, split: str, first: str) -> Records:
    text = _decoded(b"".join(lines), spec).rstrip()
    values, at = [], _space(text, 0)
    while at < len(text):
        value, at = _parse_at(text, at, spec, first)
        values.append(value)
        at = _space(text, at)
    if len(values) == 1 and isinstance(values[0], dict):
        yield from _of_object(values[0], spec, split)
    else:
        yield from _numbered(values[0] if len(values) == 1 else values, spec)


def _space(text: str, at: int) -> int:
    match = WHITESPACE.match(text, at)
    return match.end() if match else at


def _of_object(value: Record, spec: str, split: str) -> Records:
    """The rows of a file that is one object: those of the split of that name, those of its only list, or the object
    itself."""
    is_row = any(all(key in value for key in keys) for keys in SCHEMA_KEYS.values())
    lists = {name: rows for name, rows in value.items() if _is_rows(rows)}
    if is_row or not lists:
        yield f"{spec}[0]", value
    elif split in lists or (len(lists) == 1 and not SPLITS & lists.keys()):
        name = split if split in lists else next(iter(lists))
        yield from _numbered(lists[name], f"{spec}[{name}]")
    else:
        raise DataError(
            f"the file has no split {split!r}; it holds {shorten(', '.join(lists))}",
            where=spec,
            hint="splits are data.train_split and data.eval_split",
        )


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)


def _numbered(rows: list[Any], spec: str) -> Records:
    for index, row in enumerate(rows):
        yield f"{spec}[{index}]", _record(row, f"{spec}[{index}]")


def _parse(text: str, where: str) -> Any:
    try:
        return DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise DataError(f"not JSON: {error.msg} at column {error.colno}", where=where) from None
    except (ValueError, RecursionError) as error:  # a duplicate key, or a number or nesting beyond Python's limits
        raise DataError(f"not readable JSON: {error}", where=where) from None


def _parse_at(text: str, at: int, spec: str, first: str) -> tuple[Any, int]:
    try:
        return DECODER.raw_decode(text, at)
    except json.JSONDecodeError as error:
        where = f"{spec}:{error.lineno}"
        raise DataError(f"not JSON: {error.msg} at column {error.colno}", where=where) from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"not readable JSON: {error}", where=first) from None


def _record(value: Any, where: str) -> Record:
    if not isinstance(value, dict):
        raise DataError(f"the row is {shorten(value)}, not an object", where=where)
    return value


# --- CSV -------------------------------------------------------------------------------------------------------------


def _read_csv(path: Path, spec: str, *, delimiter: str | None) -> Records:
    """Each row, with the names in the first line as keys; every value is text."""
    lines = _read_lines(path)
    head = next(lines, b"")
    if delimiter is None:  # in many countries spreadsheets write a semicolon
        delimiter = max(",;\t", key=head.decode(errors="replace").count)
    csv.field_size_limit(MAX_LINE)
    texts = (_row(line, f"{spec}:{number}") for number, line in enumerate(chain([head], lines), start=1))
    reader = csv.reader(texts, delimiter=delimiter, strict=True)
    place = f"{spec}:1"
    try:
        names = next(reader, [])
        if len(set(names)) < len(names):
            raise DataError(f"the header names a column twice: {shorten(delimiter.join(names))}", where=place)
        place = f"{spec}:{reader.line_num + 1}"
        for values in reader:
            if values:
                if len(values) != len(names):
                    told = f"the row has {len(values)} values, and the header {len(names)} names"
                    raise DataError(told, where=place, hint=f"quote texts that hold {delimiter!r} or a line break")
                yield place, dict(zip(names, values, strict=True))
            place = f"{spec}:{reader.line_num + 1}"
    except csv.Error as error:
        raise DataError(f"not CSV: {error}", where=place, hint='a quote within quotes is written ""') from None


# --- Parquet ---------------------------------------------------------------------------------------------------------


def _read_parquet(path: Path, spec: str) -> Records:
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
        raise DataError(f"not a readable Parquet file: {error}", where=str(path.absolute())) from None
