"""Checks the first rows of a config's data files before anything is sent: a wrong column is reported here, and not on
the host minutes later. Formats that need more than the standard library are left to the trainer."""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, cast

from deployer.errors import UsageError
from deployer.paths import expanded
from trainer.schema import Config, SourceConfig, as_sources
from trainer.schema.data import SCHEMA_KEYS, schema_of, unknown_columns

ROWS = 20
"""Rows that are checked in each file."""
MOST_BYTES = 8 << 20
"""Maximum bytes that are read of a file; the trainer checks the rest."""
OPENERS: dict[bytes, Callable[[Path], IO[bytes]]] = {
    b"\x1f\x8b": lambda path: cast(IO[bytes], gzip.open(path)),  # noqa: SIM115 - closed by who opens it
    b"BZh": lambda path: bz2.BZ2File(path),
    b"\xfd7zXZ\x00": lambda path: lzma.LZMAFile(path),  # noqa: SIM115
}
"""First bytes of a file -> how to open it, as in the trainer."""
ZSTD = b"\x28\xb5\x2f\xfd"
PACKED = (".gz", ".bz2", ".xz", ".zst")
TABLES = {".csv": None, ".tsv": "\t"}
"""File ending -> the separator; None: the first line decides."""


def check_first_rows(config: Config, project: Path) -> None:
    """Raises UsageError if no schema fits the first rows of a file of conversations."""
    if config.recipe != "sft":
        return
    for path in _files([*config.data.train, *config.data.eval], project):
        try:
            _check_file(project / expanded(path), path, config.data.schema)
        except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
            what = (error.strerror if isinstance(error, OSError) else "") or str(error)
            raise UsageError(f"{path} cannot be read: {what}") from None


def _files(entries: list[str | SourceConfig], project: Path) -> Iterator[str]:
    from trainer.config.data import matching

    for source in as_sources(entries):
        for path in matching(source.path, project):
            if (project / expanded(path)).is_file():
                yield path


def _check_file(file: Path, name: str, schema: str) -> None:
    kind = Path(file.stem).suffix if file.suffix in PACKED else file.suffix
    with file.open("rb") as plain:
        head = plain.read(8)
    if kind not in (".jsonl", ".ndjson", ".json", *TABLES) or head.startswith(ZSTD):
        return
    opener = next((make for magic, make in OPENERS.items() if head.startswith(magic)), None)
    with opener(file) if opener else file.open("rb") as stream:
        data = stream.read(MOST_BYTES + 1)
    text = data[:MOST_BYTES].removeprefix(b"\xef\xbb\xbf").decode("utf-8", "replace")
    if not text.strip():
        raise UsageError(f"{name} has no rows")
    is_whole = len(data) <= MOST_BYTES
    rows = _table(text, name, TABLES[kind]) if kind in TABLES else _json_rows(text, name, kind, is_whole=is_whole)
    for place, row in rows:
        _check_row(row, place, schema)


def _table(text: str, name: str, delimiter: str | None) -> Iterator[tuple[str, Any]]:
    head, _, rest = text.partition("\n")
    columns = next(csv.reader([head.rstrip("\r")], delimiter=delimiter or max(",;\t", key=head.count)), [])
    if not rest.strip():
        raise UsageError(f"{name} has no rows below its first line, which names the columns")
    yield f"{name}:1", dict.fromkeys(columns, "")


def _json_rows(text: str, name: str, kind: str, *, is_whole: bool) -> Iterator[tuple[str, Any]]:
    """(place, row) of a file with one object per line, or of a list of objects; nothing for a file that only the
    trainer can read."""
    lines = text.split("\n")
    if kind == ".json" or text.lstrip()[:1] == "[":
        whole = _value(text) if is_whole else None
        if isinstance(whole, dict) and (schema_of(whole) or not any(isinstance(v, list) for v in whole.values())):
            yield f"{name}[0]", whole
        if isinstance(whole, list):
            yield from ((f"{name}[{number}]", row) for number, row in enumerate(whole[:ROWS]))
        if whole is not None or not isinstance(_value(next(filter(str.strip, lines))), dict):
            return  # objects over several lines, splits, or no JSON: the trainer says where
    seen = 0
    for number, line in enumerate(lines if is_whole else lines[:-1], start=1):
        if line.strip() and seen < ROWS:
            seen += 1
            yield f"{name}:{number}", _parsed(line, f"{name}:{number}")


def _value(text: str) -> Any:
    """The parsed line; None if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _parsed(line: str, place: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError(f"not JSON: {error.msg} at column {error.colno}", where=place) from None
    except (ValueError, RecursionError):
        raise UsageError("not readable JSON", where=place) from None


def _check_row(row: Any, place: str, schema: str) -> None:
    if not isinstance(row, dict):
        raise UsageError("the row is not an object", where=place, hint='a row is {"messages": [...]}, or the like')
    if schema == "auto" and schema_of(row) is None:
        what, hint = unknown_columns(row)
        raise UsageError(what, where=place, hint=hint)
    lacks = [key for key in SCHEMA_KEYS.get(schema, ()) if key not in row]
    if lacks:
        told = f"the row has no {' and no '.join(map(repr, lacks))}; its keys are {', '.join(map(repr, row))}"
        raise UsageError(told, where=place, hint=f"data.schema={schema} needs them in every row")
