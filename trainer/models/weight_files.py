"""Safetensors files, read piece by piece and never through a map: `trainer.files.OpenFile` says why.

Layout (https://github.com/huggingface/safetensors#format): 8 bytes, little endian, with the length of the header; the
header in JSON, {name: {"dtype", "shape", "data_offsets": [begin, end]}} and "__metadata__"; then the values, without
gaps, the offsets counted from there.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.errors import ModelError
from trainer.files import OpenFile, why_unreadable

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # as the format has it
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file."""

    file: OpenFile
    name: str
    dtype: torch.dtype | str
    """The format's own word where torch has none."""
    shape: tuple[int, ...]
    offset: int
    """Of its first byte in the file."""

    def read(self, part: tuple[slice, ...] = (), *, pinned: bool = False) -> Tensor:
        """The tensor on the CPU, or a part of it: slices with both bounds. `pinned`: in memory that a GPU reads from.

        Raises ModelError that names the file when it has changed since it was opened, or cannot be read.
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
    """The tensors of a safetensors file by name. Raises ModelError for a file that is none, or is not whole."""
    try:
        file = OpenFile(path)
        return {tensor.name: tensor for tensor in _tensors(file)}
    except OSError as error:
        raise ModelError(f"{path} cannot be read as safetensors: {error.strerror or error}") from None
    except _FormatError as error:
        raise ModelError(f"{path} cannot be read as safetensors: {error}") from None


class _FormatError(Exception):
    """What the header says cannot be."""


def _tensors(file: OpenFile) -> list[StoredTensor]:
    header, start = _read_header(file)
    tensors, at = [], start
    for name, dtype, shape, begin, end in _entries(header):
        known = DTYPES.get(dtype, dtype)
        if start + begin != at:
            raise _FormatError(f"{name} would begin at byte {start + begin:,}, and what is before it ends at {at:,}")
        needed = end - begin if isinstance(known, str) else prod(shape) * known.itemsize
        if end - begin != needed or min(shape, default=0) < 0:
            raise _FormatError(f"{name} has {end - begin:,} bytes for {list(shape)} of {dtype}, which take {needed:,}")
        tensors.append(StoredTensor(file, name, known, shape, at))
        at = start + end
    if file.size_bytes != at:
        last = f"{tensors[-1].name} ends at {at:,}" if tensors else f"its header ends at {at:,}"
        raise _FormatError(f"it has {file.size_bytes:,} bytes, and {last}")
    return tensors


def _entries(header: dict[str, Any]) -> list[tuple[str, str, tuple[int, ...], int, int]]:
    """(name, type, shape, first byte, end) in the order of the bytes."""
    entries = []
    try:
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = map(int, entry["data_offsets"])
                entries.append((name, str(entry["dtype"]), tuple(map(int, entry["shape"])), begin, end))
    except (ValueError, TypeError, KeyError, OverflowError):  # JSON of Python's has numbers without end
        raise _FormatError("its header is damaged") from None
    return sorted(entries, key=lambda entry: entry[-2:])


def _read_header(file: OpenFile) -> tuple[dict[str, Any], int]:
    """The header, and where the values begin."""
    if file.size_bytes < LENGTH_BYTES:
        raise _FormatError(f"it has {file.size_bytes} bytes")
    length = int.from_bytes(file.read((0, LENGTH_BYTES))[0], "little")
    if length > min(MAX_HEADER_BYTES, file.size_bytes - LENGTH_BYTES):
        raise _FormatError(f"it has {file.size_bytes:,} bytes, and its header would take {length:,}")
    try:
        header = json.loads(file.read((LENGTH_BYTES, length))[0])
    except (ValueError, RecursionError):
        raise _FormatError("its header is damaged") from None
    if not isinstance(header, dict):
        raise _FormatError("its header is damaged")
    return header, LENGTH_BYTES + length
