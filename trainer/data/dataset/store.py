"""Stores of tokenized documents, in memory or in token files, and a table of what happened to each row read.

Documents of token files come in pieces that fit a row, without a copy of any token. Pieces of one document overlap by a
token: the last one of a piece, which is predicted there, is what the next piece begins with. So every token of a
document but its first is a target exactly once.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, overload

import numpy as np

from trainer.data.rows.findings import Finding, Findings
from trainer.data.tokenize.chat import Encoded
from trainer.data.tokenize.encode import EncodedRow
from trainer.data.tokenize.token_file import TokenFile
from trainer.errors import DataError
from trainer.schema import DataConfig
from trainer.words import first_line

NO_TARGET = "no target token"
OVERLONG = "longer than seq_len"


class Store(Protocol):
    """Documents by number; a `TokenFile` is one."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Encoded: ...
    def name(self, index: int) -> str: ...
    @property
    def lengths(self) -> np.ndarray: ...
    @property
    def fingerprint(self) -> str: ...


class Sink(Protocol):
    """Accepts documents one by one; a `TokenWriter` is one."""

    def add(self, doc: Encoded) -> None: ...


class ListStore:
    def __init__(self, docs: Iterable[Encoded] = ()) -> None:
        self._docs = list(docs)

    def add(self, doc: Encoded) -> None:
        self._docs.append(doc)

    def __len__(self) -> int:
        return len(self._docs)

    def __getitem__(self, index: int) -> Encoded:
        return self._docs[index]

    def name(self, index: int) -> str:
        return self._docs[index].id

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(doc.ids) for doc in self._docs], dtype=np.int64)

    @property
    def fingerprint(self) -> str:
        """Changes with any id, token, target or their order."""
        digest = hashlib.sha256()
        for doc in self._docs:
            digest.update(f"{doc.id}\0{len(doc.ids)}\0".encode())
            digest.update(doc.ids.tobytes())
            digest.update(doc.is_target.tobytes())
        return digest.hexdigest()[:16]


class Selection(Sequence[Encoded]):
    """Some documents of a store, in another order, read when asked for."""

    def __init__(self, store: Store, indices: np.ndarray) -> None:
        self._store = store
        self.indices = indices
        self.lengths: np.ndarray = store.lengths[indices]
        """[documents] int64, tokens of each."""

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, index: int) -> Encoded: ...
    @overload
    def __getitem__(self, index: slice) -> Selection: ...
    def __getitem__(self, index: int | slice) -> Encoded | Selection:
        if isinstance(index, slice):
            return Selection(self._store, self.indices[index])
        return self._store[int(self.indices[index])]

    def name(self, index: int) -> str:
        """The name of a document, without reading it."""
        return self._store.name(int(self.indices[index]))

    def fingerprint(self) -> str:
        """Changes with any id, token, target or their order."""
        digest = hashlib.sha256(self._store.fingerprint.encode())
        digest.update(self.indices.tobytes())
        return digest.hexdigest()[:16]


ANEW = "remove its folder: the rows are tokenized again"
KINDS = {"source": "u2", "key": "u8", "document": "i8", "targets": "i8", "truncated": "b1"}
"""The dtypes of a RowTable's arrays."""


@dataclass(frozen=True)
class RowTable:
    """What became of each row, in the order of reading; all arrays are [rows]."""

    source: np.ndarray
    """uint16, its number among the sources."""
    key: np.ndarray
    """uint64, a hash of its content."""
    document: np.ndarray
    """int64, its number in the store; -1 for a row that was dropped."""
    targets: np.ndarray
    """int64, tokens to predict in its document."""
    truncated: np.ndarray
    """bool, whether its end was cut off."""
    dropped: dict[str, list[list[Any]]] = field(default_factory=dict)
    """[row, id] of the dropped rows by reason."""
    findings: list[Finding] = field(default_factory=list)
    """The parts of the rows that are in no document."""

    def save(self, path: Path) -> None:
        """Write all but `dropped` and `findings`, which are small, to a .npz file."""
        np.savez(
            path,
            source=self.source,
            key=self.key,
            document=self.document,
            targets=self.targets,
            truncated=self.truncated,
        )

    @classmethod
    def load(cls, path: Path, dropped: dict[str, list[list[Any]]]) -> RowTable:
        """Raises DataError with the file's name if it is missing, truncated or damaged."""
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in KINDS}
        except Exception as error:  # zipfile and numpy raise many kinds of errors for invalid files
            raise DataError(f"{path.absolute()} cannot be read: {first_line(error)}", hint=ANEW) from None
        found = {(array.dtype.str[1:], array.shape) for array in arrays.values()}
        if found != {(kind, (len(arrays["source"]),)) for kind in KINDS.values()}:
            raise DataError(f"{path.absolute()} holds other arrays than were written", hint=ANEW)
        return cls(**arrays, dropped=dropped)


def collect(rows: Iterable[EncodedRow], sink: Sink, data: DataConfig) -> RowTable:
    """Puts every row that can be trained on into `sink`, cut to seq_len, and gives the account of all."""
    table = _TableBuilder()
    for row in rows:
        doc, reason = fit(row.document, data)
        if doc is not None:
            sink.add(doc)
        table.add(row, doc, reason)
    return table.build()


def fit(encoded: Encoded, data: DataConfig) -> tuple[Encoded | None, str]:
    """The document for training, or None and the reason."""
    too_long = len(encoded.ids) > data.seq_len
    if too_long and data.overlong == "drop":
        return None, OVERLONG
    doc = encoded.cut(data.seq_len) if too_long else encoded
    if doc.num_targets == 0:
        return None, f"{NO_TARGET} in the first {data.seq_len} tokens" if encoded.num_targets else NO_TARGET
    return doc, ""


class _TableBuilder:
    """Columns of numbers: a million rows take 27 MB."""

    def __init__(self) -> None:
        self._columns = [array(code) for code in "HQqqb"]
        self._documents = 0
        self._dropped: dict[str, list[list[Any]]] = {}
        self._findings = Findings()

    def add(self, row: EncodedRow, doc: Encoded | None, reason: str) -> None:
        self._findings.add(row.document.remarks, row.document.id)
        values = (row.source, row.key, -1, 0, False)
        if doc is None:
            self._dropped.setdefault(reason, []).append([len(self._columns[0]), row.document.id])
        else:
            truncated = len(doc.ids) < len(row.document.ids)
            values = (row.source, row.key, self._documents, doc.num_targets, truncated)
            self._documents += 1
        for column, value in zip(self._columns, values, strict=True):
            column.append(value)

    def build(self) -> RowTable:
        source, key, document, targets, truncated = (np.array(column) for column in self._columns)
        return RowTable(source, key, document, targets, truncated.astype(bool), self._dropped, self._findings.list())


# --- pieces of token files -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pieces:
    """Where each piece lies; all arrays are [pieces] int64."""

    document: np.ndarray
    start: np.ndarray
    """Its first token in the document."""
    length: np.ndarray


def cut_documents(lengths: np.ndarray, *, seq_len: int) -> Pieces:
    """Documents of `lengths` [docs] tokens in pieces of `seq_len` tokens, the last of each shorter; in order.

    Documents of fewer than two tokens have no piece, for nothing in them can be predicted.
    """
    step = seq_len - 1
    counts = np.maximum(-(-(lengths - 1) // step), 0)
    document = np.repeat(np.arange(len(lengths)), counts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    start = number * step
    return Pieces(document, start, np.minimum(lengths[document] - start, seq_len))


class PieceStore:
    """The pieces of all documents of some token files, one file after another; a `Store`."""

    def __init__(self, files: Sequence[TokenFile], *, seq_len: int) -> None:
        self._files = list(files)
        self._seq_len = seq_len
        counts = [len(file) for file in files]
        self._first_document = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        lengths = np.concatenate([file.lengths for file in files]) if files else np.zeros(0, np.int64)
        self.pieces = cut_documents(lengths, seq_len=seq_len)
        """`document` counts over all files."""

    def __len__(self) -> int:
        return len(self.pieces.document)

    @property
    def lengths(self) -> np.ndarray:
        """[pieces] int64, tokens of each."""
        return self.pieces.length

    def __getitem__(self, index: int) -> Encoded:
        file, document = self._place(index)
        begin = int(self.pieces.start[index])
        part = file.part(document, begin, begin + int(self.pieces.length[index]))
        return Encoded(self._name(index, part.id), part.ids, part.is_target)

    def name(self, index: int) -> str:
        """`DOCUMENT`, or `DOCUMENT[first:end]` if it has several pieces."""
        file, document = self._place(index)
        return self._name(index, file.name(document))

    def _name(self, index: int, document: str) -> str:
        begin, length = int(self.pieces.start[index]), int(self.pieces.length[index])
        whole = begin == 0 and length < self._seq_len
        return document if whole else f"{document}[{begin}:{begin + length}]"

    @property
    def all_targets(self) -> bool:
        """Whether every token but a piece's first is a target."""
        return not any(file.header.has_targets for file in self._files)

    @property
    def fingerprint(self) -> str:
        """Changes with any id, target, name or their order, and with seq_len."""
        parts = [str(self._seq_len), *(file.fingerprint for file in self._files)]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]

    def _place(self, index: int) -> tuple[TokenFile, int]:
        document = int(self.pieces.document[index])
        file = int(np.searchsorted(self._first_document, document, side="right")) - 1
        return self._files[file], document - int(self._first_document[file])
