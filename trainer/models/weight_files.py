"""Safetensors files, read piece by piece and never memory-mapped: `trainer.files.OpenFile` gives the reason.

Layout (https://github.com/huggingface/safetensors#format): 8 bytes, little endian, with the length of the header; the
header in JSON, {name: {"dtype", "shape", "data_offsets": [begin, end]}} and "__metadata__"; then the values, without
gaps, the offsets counted from there.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.errors import ModelError
from trainer.files import OpenFile, why_unreadable
from trainer.typed import Count, InvalidData, from_json, parse_json
from trainer.words import shortened

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the format's limit
MAX_DIMS = 64  # torch's limit
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """A header's values for a tensor."""

    dtype: str
    shape: tuple[Count, ...]
    data_offsets: tuple[Count, Count]


@dataclass(frozen=True)
class StoredTensor:
    file: OpenFile
    name: str
    dtype: torch.dtype | str
    """The format's name of it if torch has no such dtype."""
    shape: tuple[int, ...]
    offset: int
    """Position of its first byte in the file."""

    def read(self, part: tuple[slice, ...] = (), *, pinned: bool = False) -> Tensor:
        """The tensor on the CPU, or a part of it: slices with both bounds. `pinned`: in memory that a GPU reads from.

        Raises ModelError that names the file if it has changed since it was opened, or cannot be read.
        """
        if isinstance(self.dtype, str):
            raise ModelError(f"{self.file.path}: {self.name} is of type {self.dtype}, which is not supported")
        rows = part[0] if part else slice(0, prod(self.shape[:1]))
        row_bytes = prod(self.shape[1:]) * self.dtype.itemsize
        raw = torch.empty((rows.stop - rows.start) * row_bytes, dtype=torch.uint8, pin_memory=pinned)
        try:
            self.file.read_into(raw.numpy(), self.offset + rows.start * row_bytes)
        except OSError as error:
            raise ModelError(f"{self.file.path} {why_unreadable(error)}") from None
        values = raw.view(self.dtype).view((rows.stop - rows.start, *self.shape[1:]) if self.shape else ())
        within = (slice(None), *part[1:])
        return values[within] if part[1:] else values


def open_weights(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file by name. Raises ModelError for another kind of file, and for a damaged one."""
    try:
        file = OpenFile(path)
        return {tensor.name: tensor for tensor in _tensors(file)}
    except OSError as error:
        raise ModelError(f"{path} cannot be read as safetensors: {error.strerror or error}") from None
    except InvalidData as damage:
        raise ModelError(f"{path} cannot be read as safetensors: {damage}") from None


def _tensors(file: OpenFile) -> list[StoredTensor]:
    entries, start = _read_header(file)
    tensors: list[StoredTensor] = []
    at = start
    for name, entry in entries:
        (begin, end), shape, dtype = entry.data_offsets, entry.shape, entry.dtype
        known = DTYPES.get(dtype, dtype)
        if start + begin != at:
            raise InvalidData(
                f"would begin at byte {start + begin:,}, and what is before it ends at {at:,}", place=name
            )
        if len(shape) > MAX_DIMS:
            raise InvalidData(f"has {len(shape):,} dimensions", place=name)
        needed = end - begin if isinstance(known, str) else prod(shape) * known.itemsize
        if end - begin != needed:
            told = f"has {end - begin:,} bytes for {shortened(list(shape))} of {shortened(dtype)}"
            raise InvalidData(f"{told}, which take {needed:,}", place=name)
        tensors.append(StoredTensor(file, name, known, shape, at))
        at = start + end
    if file.size_bytes != at:
        last = f"{tensors[-1].name} ends at {at:,}" if tensors else f"its header ends at {at:,}"
        raise InvalidData(f"has {file.size_bytes:,} bytes, and {last}")
    return tensors


def _read_header(file: OpenFile) -> tuple[list[tuple[str, Entry]], int]:
    """The tensors in the order of their bytes, and the offset at which the values begin."""
    if file.size_bytes < LENGTH_BYTES:
        raise InvalidData(f"has {file.size_bytes} bytes")
    length = int.from_bytes(file.read((0, LENGTH_BYTES))[0], "little")
    if length > min(MAX_HEADER_BYTES, file.size_bytes - LENGTH_BYTES):
        raise InvalidData(f"has {file.size_bytes:,} bytes, and its header would take {length:,}")
    try:
        header = from_json(parse_json(file.read((LENGTH_BYTES, length))[0], most=MAX_HEADER_BYTES), dict[str, Any])
        header.pop("__metadata__", None)
        entries = from_json(header, dict[str, Entry])
    except InvalidData as damage:
        raise InvalidData(f"is damaged: {damage}", place="its header") from None
    return sorted(entries.items(), key=lambda item: item[1].data_offsets), LENGTH_BYTES + length
