"""Token files, `NAME.tokens`: tokenized documents on disk; only the requested parts are read.

Layout, little endian: a prologue of 64 bytes (magic, format version, the header's size and place), then six arrays,
each at a multiple of 64 bytes, then the header as JSON. `ids` [tokens] uint16 or uint32; `offsets` [docs + 1] uint64,
where each document begins in `ids`; `targets`, a bit for each token, lowest bit first, empty if all are targets;
`keys` [docs] uint64, a hash of each document's content; `name_offsets` [docs + 1] uint64 and `names`, in UTF-8.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from trainer.config.data import TOKEN_SUFFIX
from trainer.data.tokenize.chat import Encoded
from trainer.errors import DataError
from trainer.files import FileChangedError, OpenFile, why_unreadable
from trainer.typed import Count, InvalidData, from_json, parse_json

SUFFIX = TOKEN_SUFFIX
MAGIC = b"TFTOKENS"
VERSION = 1
ALIGN = 64
PROLOGUE = struct.Struct("<8sIIQ")  # magic, version, bytes of the header, where it begins
SECTIONS = ("ids", "offsets", "targets", "keys", "name_offsets", "names")
CHUNK_BYTES = 1 << 20
FileSpan = tuple[str, int, int]
"""A section, the first byte in it, and the number of bytes."""


@dataclass(frozen=True)
class TokenHeader:
    """A token file's header. `num_targets`: tokens to predict; a document's first token never counts."""

    dtype: Literal["uint16", "uint32"]
    vocab_size: Count
    """Of the tokenizer; every id is smaller."""
    tokenizer: str
    """The tokenizer's hash."""
    num_docs: Count
    num_tokens: Count
    num_targets: Count
    max_id: int
    """-1 without tokens."""
    has_targets: bool
    """Whether the file says which tokens are targets; otherwise all are."""
    content_hash: str
    """BLAKE2b of the arrays."""
    sections: dict[str, tuple[Count, Count]]
    """[first byte, bytes] of each array."""
    meta: dict[str, Any] = field(default_factory=dict)


class TokenFile:
    """A token file as a sequence of documents: `file[i]` reads one, `file.lengths` [docs] int64 reads none.

    Reading raises DataError if the file has been overwritten since it was opened. If it was replaced by another file,
    or removed, reading still works: the opened file still exists.
    """

    def __init__(self, file: OpenFile, header: TokenHeader) -> None:
        self.path = file.path
        self.header = header
        self._file = file
        self._dtype = np.dtype(header.dtype).newbyteorder("<")
        self._offsets = self._read_borders("offsets", header.num_tokens)
        self._name_offsets = self._read_borders("name_offsets", header.sections["names"][1])

    @classmethod
    def open(cls, path: Path) -> TokenFile:
        """Raises DataError if it is not a token file, has another format version, or is truncated."""
        path = Path(path)
        try:
            file = OpenFile(path)
            return cls(file, _read_header(file))
        except OSError as error:
            raise _unreadable(path, error) from None

    def __len__(self) -> int:
        return self.header.num_docs

    def __getitem__(self, index: int) -> Encoded:
        """Document `index`; its ids are int32."""
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        return self.part(index, 0, int(self._offsets[index + 1] - self._offsets[index]))

    def part(self, index: int, begin: int, end: int) -> Encoded:
        """Tokens `begin` to `end` of document `index`; nothing else is read."""
        first = int(self._offsets[index])
        first, last = first + begin, first + end
        size = self._dtype.itemsize
        ids, bits, name = self._read(
            ("ids", first * size, (last - first) * size),
            self._place_of_targets(first, last),
            self._place_of_name(index),
        )
        return Encoded(
            name.decode(errors="replace"),
            _as_int32(np.frombuffer(ids, self._dtype)),
            _targets(bits, first, last - first),
        )

    def __iter__(self) -> Iterator[Encoded]:
        return (self[index] for index in range(len(self)))

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self._offsets)

    @property
    def keys(self) -> np.ndarray:
        """[docs] uint64, equal for documents with the same content; names do not matter."""
        [keys] = self._read(("keys", 0, 8 * len(self)))
        return np.frombuffer(keys, "<u8")

    @property
    def fingerprint(self) -> str:
        """Changes with any id, target, name or their order."""
        return self.header.content_hash[:16]

    def name(self, index: int) -> str:
        """The name of document `index`, without reading it."""
        [name] = self._read(self._place_of_name(index))
        return name.decode()

    def check(self, *, vocab_size: int, tokenizer: str | None = None) -> None:
        """Raise DataError if another tokenizer made the file, or if it has an ID that the model does not have.

        `vocab_size`: rows of the model's embedding. `tokenizer`: the hash of the run's tokenizer; None: not compared.
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

    def _place_of_name(self, index: int) -> FileSpan:
        begin, end = self._name_offsets[index : index + 2].tolist()
        return "names", begin, end - begin

    def _place_of_targets(self, first: int, last: int) -> FileSpan:
        if not self.header.has_targets:
            return "targets", 0, 0
        return "targets", first // 8, -(-last // 8) - first // 8

    def _read(self, *places: FileSpan) -> list[bytes]:
        sections = self.header.sections
        try:
            return self._file.read(*((sections[name][0] + begin, size) for name, begin, size in places))
        except OSError as error:
            raise _unreadable(self.path, error) from None

    def _read_borders(self, section: str, end: int) -> np.ndarray:
        """[docs + 1] int64, where each document begins. Raises DataError unless they ascend from 0 to `end`."""
        [read] = self._read((section, 0, 8 * (len(self) + 1)))
        borders = np.frombuffer(read, "<i8")
        if borders[0] != 0 or borders[-1] != end or (np.diff(borders) < 0).any():
            raise _damaged(self.path, InvalidData(f"do not ascend from 0 to {end:,}", place=section))
        return borders

    def _first_outside(self, vocab_size: int) -> tuple[int, int, int]:
        """(document, token in it, id) of the first id that is too large."""
        step = CHUNK_BYTES
        for start in range(0, self.header.num_tokens, step):
            count = min(step, self.header.num_tokens - start)
            [read] = self._read(("ids", start * self._dtype.itemsize, count * self._dtype.itemsize))
            ids = np.frombuffer(read, self._dtype)
            found = np.flatnonzero(ids >= vocab_size)
            if found.size:
                token = start + int(found[0])
                index = int(np.searchsorted(self._offsets, token, side="right")) - 1
                return index, token - int(self._offsets[index]), int(ids[found[0]])
        raise DataError("the header names a largest id that the file does not hold", where=str(self.path.absolute()))


def check_ids(doc: Encoded, vocab_size: int, *, of: str = "the model") -> None:
    """Raise DataError for a document with an ID outside of 0 to `vocab_size` - 1. `of`: its owner, for the message."""
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


def _targets(bits: bytes, first: int, count: int) -> np.ndarray:
    """[count] bool. `bits`: from the byte that contains token `first`'s bit on; if empty, all are true."""
    if not bits:
        return np.ones(count, dtype=bool)
    flags = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")
    return flags[first % 8 : first % 8 + count].astype(bool)


def _read_header(file: OpenFile) -> TokenHeader:
    """Raises OSError if the file cannot be read, DataError if it is not a complete token file."""
    where = str(file.path.absolute())
    [begin] = file.read((0, min(file.size_bytes, ALIGN)))
    if begin[: len(MAGIC)] != MAGIC:
        raise DataError("this is no token file", where=where, hint="`train.py tokenize` makes one of texts")
    if len(begin) < ALIGN:
        raise DataError(f"the token file is truncated: {len(begin)} bytes", where=where, hint="copy it again")
    _, version, size, start = PROLOGUE.unpack_from(begin)
    if version != VERSION:
        message = f"the token file has format {version}, and this program reads format {VERSION}"
        raise DataError(message, where=where, hint="tokenize the texts again, or use the newer program")
    if file.size_bytes != start + size:
        message = f"the token file is truncated: {file.size_bytes:,} of {start + size:,} bytes"
        raise DataError(message, where=where, hint="copy it again")
    try:
        header = from_json(parse_json(file.read((start, size))[0], most=size), TokenHeader)
        lacking = [name for name in SECTIONS if name not in header.sections]
        if lacking:
            raise InvalidData("is missing", place=f"sections.{lacking[0]}")
    except InvalidData as damage:
        raise _damaged(file.path, damage) from None
    fits = all(header.sections[name][1] == size for name, size in _section_bytes(header).items())
    if not fits or _end_of_sections(header) != start:
        raise _damaged(file.path, InvalidData("do not fit its numbers", place="sections"))
    return header


def _section_bytes(header: TokenHeader) -> dict[str, int]:
    """The bytes of each array; for `names`, as the header says, because their length is not stored elsewhere."""
    docs, tokens = header.num_docs, header.num_tokens
    return {
        "ids": tokens * {"uint16": 2, "uint32": 4}[header.dtype],
        "offsets": 8 * (docs + 1),
        "targets": -(-tokens // 8) if header.has_targets else 0,
        "keys": 8 * docs,
        "name_offsets": 8 * (docs + 1),
        "names": header.sections["names"][1],
    }


def _end_of_sections(header: TokenHeader) -> int:
    """Where the header must begin; -1 unless each array begins where the previous one ends."""
    at = ALIGN
    for name in SECTIONS:
        begin, size = header.sections[name]
        if begin != at:
            return -1
        at = -(-(begin + size) // ALIGN) * ALIGN
    return at


def _damaged(path: Path, damage: InvalidData) -> DataError:
    return DataError(f"the token file's header is damaged: {damage}", where=str(path.absolute()), hint="copy it again")


def _unreadable(path: Path, error: OSError) -> DataError:
    if not isinstance(error, FileChangedError):
        return DataError(f"{path.absolute()} {why_unreadable(error)}")
    return DataError(
        f"the token file {why_unreadable(error)}",
        where=str(path.absolute()),
        hint="put the file back as it was and resume; to replace one, move the new one into its place",
    )
