"""Writes token files document by document, atomically; `trainer.data.tokenize.token_file` describes their layout."""

from __future__ import annotations

import json
import os
import shutil
import struct
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any

import numpy as np

from trainer.data.tokenize.chat import Encoded
from trainer.data.tokenize.token_file import (
    ALIGN,
    CHUNK_BYTES,
    MAGIC,
    PROLOGUE,
    SECTIONS,
    VERSION,
    TokenHeader,
    check_ids,
)
from trainer.errors import DataError
from trainer.files import sync_folder

UINT16_VOCAB = 1 << 16


class TokenWriter:
    """Writes a token file: `with TokenWriter(path, …) as writer: writer.add(doc)`.

    Memory does not grow with the tokens. The file gets its name when it is complete and on disk; after an exception
    or a kill an earlier file is unchanged. Raises DataError if it cannot be written.
    """

    def __init__(
        self, path: Path, *, vocab_size: int, tokenizer: str, has_targets: bool, meta: dict[str, Any] | None = None
    ) -> None:
        self.path = Path(path)
        self._vocab_size, self._tokenizer, self._has_targets = vocab_size, tokenizer, has_targets
        self._meta = {} if meta is None else meta  # the caller may add to it until the file is complete
        self._dtype = np.dtype("<u2" if vocab_size <= UINT16_VOCAB else "<u4")
        self._num_docs = self._num_tokens = self._num_targets = self._name_bytes = 0
        self._max_id = -1
        self._bits = np.zeros(0, dtype=bool)  # the bits of the last, incomplete byte of `targets`
        self._open = ExitStack()
        self._files: dict[str, IO[bytes]] = {}

    def __enter__(self) -> TokenWriter:
        with _writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=f".tmp_{self.path.name}_")
            self._aside = Path(name)
            self._open.callback(self._aside.unlink, missing_ok=True)
            main = self._open.enter_context(os.fdopen(handle, "w+b"))
            main.write(bytes(ALIGN))
            self._files = {"ids": main}
            for section in SECTIONS[1:]:
                self._files[section] = self._open.enter_context(tempfile.TemporaryFile(dir=self.path.parent))
            self._files["offsets"].write(bytes(8))
            self._files["name_offsets"].write(bytes(8))
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with self._open:
            if kind is None:
                with _writing(self.path):
                    self._finish()

    @property
    def dtype(self) -> str:
        """The dtype of the IDs: uint16 if the vocabulary is small enough, else uint32."""
        name: str = self._dtype.name
        return name

    def add(self, doc: Encoded) -> None:
        """Append a document. Raises DataError for an ID outside the vocabulary."""
        check_ids(doc, self._vocab_size, of="the tokenizer")
        name = doc.id.encode("utf-8", errors="replace")
        self._num_docs += 1
        self._num_tokens += len(doc.ids)
        self._name_bytes += len(name)
        self._max_id = max(self._max_id, int(doc.ids.max(initial=-1)))
        with _writing(self.path):
            self._files["ids"].write(doc.ids.astype(self._dtype).tobytes())
            self._files["offsets"].write(struct.pack("<Q", self._num_tokens))
            self._files["keys"].write(_content_key(doc))
            self._files["name_offsets"].write(struct.pack("<Q", self._name_bytes))
            self._files["names"].write(name)
            self._add_targets(doc)

    def _add_targets(self, doc: Encoded) -> None:
        if not self._has_targets:
            self._num_targets += max(0, len(doc.ids) - 1)
            return
        self._num_targets += doc.num_targets
        bits = np.concatenate([self._bits, doc.is_target])
        whole = len(bits) // 8 * 8
        self._files["targets"].write(np.packbits(bits[:whole], bitorder="little").tobytes())
        self._bits = bits[whole:]

    def _finish(self) -> None:
        main = self._files["ids"]
        self._files["targets"].write(np.packbits(self._bits, bitorder="little").tobytes())
        sections = {"ids": [ALIGN, self._num_tokens * self._dtype.itemsize]}
        for name in SECTIONS[1:]:
            size = self._files[name].tell()
            sections[name] = [_pad(main), size]
            self._files[name].seek(0)
            shutil.copyfileobj(self._files[name], main, CHUNK_BYTES)
        header = json.dumps(asdict(self._header(sections, _hash_sections(main, sections)))).encode()
        start = _pad(main)
        main.write(header)
        main.seek(0)
        main.write(PROLOGUE.pack(MAGIC, VERSION, len(header), start))
        main.flush()
        os.fsync(main.fileno())
        self._aside.chmod(0o666 & ~_umask())  # mkstemp creates files that only the owner can read
        self._aside.replace(self.path)
        with suppress(OSError):  # some network file systems do not support it
            sync_folder(self.path.parent)

    def _header(self, sections: dict[str, list[int]], content_hash: str) -> TokenHeader:
        return TokenHeader(
            dtype="uint16" if self._dtype.itemsize == 2 else "uint32",
            vocab_size=self._vocab_size,
            tokenizer=self._tokenizer,
            num_docs=self._num_docs,
            num_tokens=self._num_tokens,
            num_targets=self._num_targets,
            max_id=self._max_id,
            has_targets=self._has_targets,
            content_hash=content_hash,
            sections={name: (begin, size) for name, (begin, size) in sections.items()},
            meta=self._meta,
        )


def _content_key(doc: Encoded) -> bytes:
    digest = blake2b(doc.ids.astype("<i4").tobytes(), digest_size=8)
    digest.update(np.packbits(doc.is_target).tobytes())
    return digest.digest()


def _pad(file: IO[bytes]) -> int:
    """Fill up to the next multiple of ALIGN, and return the position."""
    file.seek(0, os.SEEK_END)
    file.write(bytes(-file.tell() % ALIGN))
    return file.tell()


def _hash_sections(file: IO[bytes], sections: dict[str, list[int]]) -> str:
    digest = blake2b(digest_size=20)
    for name in SECTIONS:
        start, left = sections[name]
        digest.update(f"{name} {left}\n".encode())
        file.seek(start)
        while left > 0 and (part := file.read(min(left, CHUNK_BYTES))):
            digest.update(part)
            left -= len(part)
    return digest.hexdigest()


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"{path.absolute()} cannot be written: {error.strerror or error}") from None


def _umask() -> int:
    value = os.umask(0)
    os.umask(value)
    return value
