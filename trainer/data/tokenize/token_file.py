"""Token files, `NAME.tokens`: tokenized documents on disk, read through a memory map however many there are.

Layout, little endian: a prologue of 64 bytes (magic, format version, where the header stands), then six arrays, each
at a multiple of 64 bytes, then the header as JSON. `ids` [tokens] uint16 or uint32; `offsets` [docs + 1] uint64, where
each document begins in it; `targets`, a bit for each token, the first one lowest, empty when all are targets;
`keys` [docs] uint64, a hash of what each document says; `name_offsets` [docs + 1] uint64 and `names`, in UTF-8.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from trainer.config.data import TOKEN_SUFFIX
from trainer.data.tokenize.chat import Encoded
from trainer.errors import DataError

SUFFIX = TOKEN_SUFFIX
MAGIC = b"TFTOKENS"
VERSION = 1
ALIGN = 64
PROLOGUE = struct.Struct("<8sIIQ")  # magic, version, bytes of the header, where it begins
SECTIONS = ("ids", "offsets", "targets", "keys", "name_offsets", "names")
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class TokenHeader:
    """What a token file says of itself. `num_targets`: tokens to predict, never a document's first one."""

    dtype: str
    vocab_size: int
    """Of the tokenizer; every id is smaller."""
    tokenizer: str
    """The tokenizer's hash."""
    num_docs: int
    num_tokens: int
    num_targets: int
    max_id: int
    """-1 without tokens."""
    has_targets: bool
    """Whether the file says which tokens are targets; otherwise all are."""
    content_hash: str
    """BLAKE2b of the arrays."""
    sections: dict[str, list[int]]
    """[first byte, bytes] of each array."""
    meta: dict[str, Any] = field(default_factory=dict)


class TokenFile:
    """A token file as a sequence of documents: `file[i]` reads one, `file.lengths` [docs] int64 needs none of them.

    Reading raises DataError when the file has been written over since it was opened. A file that was put in its place
    or that was removed changes nothing: what was opened is still there.
    """

    def __init__(self, path: Path, header: TokenHeader, data: np.ndarray, found: os.stat_result) -> None:
        self.path = path
        self.header = header
        self._found = found
        arrays = {name: data[start : start + size] for name, (start, size) in header.sections.items()}
        self._ids = arrays["ids"].view(f"<{np.dtype(header.dtype).str[1:]}")
        self._offsets = arrays["offsets"].view("<u8").astype(np.int64)
        self._targets = arrays["targets"]
        self._keys = arrays["keys"].view("<u8")
        self._name_offsets = arrays["name_offsets"].view("<u8")
        self._names = arrays["names"]

    @classmethod
    def open(cls, path: Path) -> TokenFile:
        """Raises DataError when it is no token file, of another format version, or truncated."""
        path = Path(path)
        try:
            with path.open("rb") as file:
                found = os.fstat(file.fileno())
                data = np.asarray(np.memmap(file, mode="r", dtype=np.uint8)) if found.st_size else np.zeros(0, np.uint8)
        except OSError as error:
            raise DataError(f"{path.absolute()} cannot be read: {error.strerror}") from None
        return cls(path, _read_header(path, data), data, found)

    def __len__(self) -> int:
        return self.header.num_docs

    def __getitem__(self, index: int) -> Encoded:
        """Document `index`; its ids are int32, a view of the file where that holds uint32."""
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        return self.part(index, 0, int(self._offsets[index + 1] - self._offsets[index]))

    def part(self, index: int, begin: int, end: int) -> Encoded:
        """Tokens `begin` to `end` of document `index`; nothing else is read."""
        self._check_unchanged()
        first = int(self._offsets[index])
        ids = self._ids[first + begin : first + end]
        return Encoded(self.name(index), _as_int32(ids), self._is_target(first + begin, first + end))

    def __iter__(self) -> Iterator[Encoded]:
        return (self[index] for index in range(len(self)))

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self._offsets)

    @property
    def keys(self) -> np.ndarray:
        """[docs] uint64, equal for documents that say the same, whatever their names."""
        return self._keys

    @property
    def fingerprint(self) -> str:
        """Changes with any id, target, name or their order."""
        return self.header.content_hash[:16]

    def name(self, index: int) -> str:
        """The name of document `index`, without reading it."""
        begin, end = self._name_offsets[index], self._name_offsets[index + 1]
        return self._names[begin:end].tobytes().decode()

    def check(self, *, vocab_size: int, tokenizer: str | None = None) -> None:
        """Raise DataError when another tokenizer made the file, or when it has an id that a model does not know.

        `vocab_size`: rows of the model's embedding. `tokenizer`: the hash of the run's; None: any will do.
        """
        header = self.header
        if tokenizer is not None and header.tokenizer != tokenizer:
            raise DataError(
                f"the file was made with another tokenizer: {header.tokenizer} of {header.vocab_size} tokens, "
                f"and this run's is {tokenizer}",
                where=str(self.path.absolute()),
                hint="tokenize the texts again, or set data.tokenizer to the one that made the file",
            )
        if header.max_id >= vocab_size:
            place = self._first_outside(vocab_size)
            raise DataError(
                f"the file was made for a vocabulary of {header.vocab_size} tokens and the model has {vocab_size}: "
                f"document {place[0]} ({self.name(place[0])}) holds id {place[2]} at token {place[1]}",
                where=str(self.path.absolute()),
                hint="tokenize the texts again with the model's own tokenizer",
            )

    def _check_unchanged(self) -> None:
        """The map shows whatever is written into the file, and a file that got shorter ends the process (SIGBUS)."""
        try:
            now = self.path.stat()
        except OSError:
            return
        before = self._found
        if (now.st_dev, now.st_ino) != (before.st_dev, before.st_ino):
            return
        if (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
            raise DataError(
                f"the token file has changed while it was read: {_bytes_and_time(before)}, now {_bytes_and_time(now)}",
                where=str(self.path.absolute()),
                hint="put the file back as it was and resume; to replace one, move the new one into its place",
            )

    def _is_target(self, begin: int, end: int) -> np.ndarray:
        if not self.header.has_targets:
            return np.ones(end - begin, dtype=bool)
        first = begin // 8
        bits = np.unpackbits(self._targets[first : -(-end // 8)], bitorder="little")
        return bits[begin - first * 8 : end - first * 8].astype(bool)

    def _first_outside(self, vocab_size: int) -> tuple[int, int, int]:
        """(document, token in it, id) of the first id that is too large."""
        step = CHUNK_BYTES
        for start in range(0, len(self._ids), step):
            found = np.flatnonzero(self._ids[start : start + step] >= vocab_size)
            if found.size:
                token = start + int(found[0])
                index = int(np.searchsorted(self._offsets, token, side="right")) - 1
                return index, token - int(self._offsets[index]), int(self._ids[token])
        raise DataError("the header names a largest id that the file does not hold", where=str(self.path.absolute()))


def check_ids(doc: Encoded, vocab_size: int, *, of: str = "the model") -> None:
    """Raise DataError for a document that holds an id that `of`, which knows `vocab_size` of them, does not have."""
    ids = doc.ids
    if ids.size and (ids.max() >= vocab_size or ids.min() < 0):
        place = int(np.flatnonzero((ids >= vocab_size) | (ids < 0))[0])
        raise DataError(
            f"token {place} has id {int(ids[place])}, and {of} has ids 0 to {vocab_size - 1}",
            where=doc.id,
            hint="data.tokenizer must be the one that the model was made with",
        )


def _as_int32(ids: np.ndarray) -> np.ndarray:
    return ids.view("<i4") if ids.dtype.itemsize == 4 else ids.astype(np.int32)


def _read_header(path: Path, data: np.ndarray) -> TokenHeader:
    where = str(path.absolute())
    if data[: len(MAGIC)].tobytes() != MAGIC:
        raise DataError("this is no token file", where=where, hint="`train.py tokenize` makes one of texts")
    if len(data) < ALIGN:
        raise DataError(f"the token file is truncated: {len(data)} bytes", where=where, hint="copy it again")
    _, version, size, start = PROLOGUE.unpack_from(data.data)
    if version != VERSION:
        message = f"the token file has format {version}, and this program reads format {VERSION}"
        raise DataError(message, where=where, hint="tokenize the texts again, or use the newer program")
    if len(data) != start + size:
        message = f"the token file is truncated: {len(data):,} of {start + size:,} bytes"
        raise DataError(message, where=where, hint="copy it again")
    known = {field.name for field in fields(TokenHeader)}
    try:
        values = json.loads(data[start : start + size].tobytes())
        return TokenHeader(**{name: value for name, value in values.items() if name in known})
    except (ValueError, TypeError, AttributeError):
        raise DataError("the token file's header is damaged", where=where, hint="copy it again") from None


def _bytes_and_time(found: os.stat_result) -> str:
    return f"{found.st_size:,} bytes of {datetime.fromtimestamp(found.st_mtime):%Y-%m-%d %H:%M:%S}"
