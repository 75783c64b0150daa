"""Reads conversations of any schema from files, data set names and the built-in text, as one kind of row."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

from trainer.config.data import is_pattern, matching
from trainer.config.load import LOCAL_STARTS
from trainer.config.rules import LOCAL_SUFFIXES
from trainer.console import shown
from trainer.data.rows.files import read_file
from trainer.data.rows.messages import Record, Row, build_row, detect_schema, question_answer
from trainer.data.rows.stdlib_docs import is_held_out, read_stdlib_pairs
from trainer.errors import DataError
from trainer.files import expanded

STDLIB_DOCS = "builtin:stdlib-docs"
SAVED_MARKS = ("dataset_dict.json", "state.json")
HUB_URL = re.compile(r"(?:hf://|https?://(?:www\.)?huggingface\.co/)datasets/(?P<name>[^/@]+/[^/@?#]+)")
TRAIN, HELD_OUT = "train", "test"
"""The built-in text's two splits."""


def read_conversations(
    spec: str, *, split: str = TRAIN, schema: str = "auto", limit: int | None = None, held_out_share: float = 0.05
) -> Iterator[Row]:
    """The first `limit` conversations of `spec`, in its own order, read lazily.

    `spec`: a file as `read_file` takes it or a pattern of files (`data/*.jsonl`), a Hugging Face data set (`name` or
    `name:config`) or a folder that `datasets` can load, or `builtin:stdlib-docs`. `split` names a split of data sets
    and of the built-in text, where "test" is `held_out_share` of the modules. Raises DataError for anything that cannot
    be read.
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
    """Values that change with the content of `spec`: path, size and time of its files, or a data set's fingerprint."""
    if spec.startswith("builtin:"):
        return [spec, split, sys.version]
    if "://" not in spec and not is_local(spec):
        return [spec, split, _load_dataset(spec, split)._fingerprint]
    path = expanded(spec)
    files = _files(spec)
    if files is None:
        files = sorted(entry for entry in path.rglob("*") if entry.is_file())
    return [spec, split, *(_identify_file(entry) for entry in files)]


def _identify_file(path: Path) -> list[Any]:
    try:
        found = path.stat()
    except OSError:
        raise DataError(f"there is no file {path.absolute()}", hint="check data.train and data.eval") from None
    return [str(path.absolute()), found.st_size, found.st_mtime_ns]


# --- where records come from -----------------------------------------------------------------------------------------


def is_local(spec: str) -> bool:
    """Whether `spec` must be a file or folder on this machine, and not the name of a data set."""
    return spec.startswith(LOCAL_STARTS) or spec.endswith(LOCAL_SUFFIXES) or is_pattern(spec) or Path(spec).exists()


def _shown(spec: str) -> str:
    return str(expanded(spec).absolute()) if is_local(spec) else spec


def read_records(spec: str, split: str) -> Iterator[tuple[str, Record]]:
    """(id, row) of each row of files, or of a data set; read lazily."""
    files = _files(spec)
    if files is None:
        return _read_dataset(spec, split)
    named = ((path, spec) if len(files) == 1 and path == expanded(spec) else (path, shown(path)) for path in files)
    return chain.from_iterable(read_file(path, name, split) for path, name in named)


def _files(spec: str) -> list[Path] | None:
    """The files that `spec` names, sorted by name; None: it is a folder or a data set for `datasets`."""
    if "://" in spec:
        known = HUB_URL.match(spec)
        hint = f"write its name, {known['name']}" if known else "download it, and name the file"
        raise DataError(f"{spec} is a URL, and data comes from files and named data sets", hint=hint)
    if not is_local(spec):
        return None
    paths = [Path(path) for path in matching(str(expanded(spec)))]
    if not paths[0].exists():
        raise DataError(f"there is no file {paths[0].absolute()}", hint="check data.train and data.eval")
    return None if paths[0].is_dir() and len(paths) == 1 else paths


def _read_dataset(spec: str, split: str) -> Iterator[tuple[str, Record]]:
    for index, record in enumerate(_load_dataset(spec, split)):
        yield f"{spec}[{index}]", record


def _load_dataset(spec: str, split: str) -> Any:
    import datasets

    name, _, config = spec.partition(":")
    folder = Path(spec)
    try:
        if any((folder / mark).is_file() for mark in SAVED_MARKS):  # by save_to_disk
            saved = datasets.load_from_disk(spec)
            if isinstance(saved, datasets.DatasetDict) and split not in saved:
                raise ValueError(f"it has the splits {', '.join(saved)}")
            return saved[split] if isinstance(saved, datasets.DatasetDict) else saved
        return datasets.load_dataset(name, config or None, split=split, trust_remote_code=False)
    except Exception as error:  # the library raises its own errors, the hub client's, OSError and ValueError
        raise DataError(
            f"the data set {spec!r} (split {split!r}) cannot be loaded: {_first_line(error)}",
            hint="without internet use a file; a configuration is written as name:config; "
            "splits are data.train_split and data.eval_split",
        ) from error


def _first_line(error: BaseException) -> str:
    while error.__cause__ is not None:  # the library's own error only says that the data set could not be created
        error = error.__cause__
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
