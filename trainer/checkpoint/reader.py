"""Torch's reader of shards, restricted so that it runs no code from the folder, which may be untrusted.

`.metadata` is a pickle, which torch loads without restriction. Here it may only build the types that torch writes into
it. Torch loads the tensors of a shard with `weights_only`. It would load other objects without; the trainer's
checkpoints contain none, and they are left out.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.serialization import _get_layout

from trainer.checkpoint.folders import METADATA_FILE


class PlainReader(FileSystemReader):
    """Reads a folder of `torch.distributed.checkpoint`."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Raises pickle.UnpicklingError if the file does not describe tensors in this folder."""
        with (Path(self.path) / METADATA_FILE).open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata) or not isinstance(metadata.state_dict_metadata, dict):
            raise pickle.UnpicklingError(f"{METADATA_FILE} does not describe a checkpoint")
        for stored in (metadata.storage_data or {}).values():
            if Path(stored.relative_path).name != stored.relative_path:
                raise pickle.UnpicklingError(
                    f"{METADATA_FILE} names {stored.relative_path}, which is not in its folder"
                )
        kept = metadata.state_dict_metadata.items()
        metadata.state_dict_metadata = {name: entry for name, entry in kept if isinstance(entry, TensorStorageMetadata)}
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def _member(of: object, name: str) -> object:
    """Replaces `getattr` in the pickle: the first releases of Python 3.11 pickle an Enum's member by its name."""
    if of is not _MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError(f"{METADATA_FILE} asks for {name} of {of!r}, which no checkpoint needs")
    return _MEM_FORMAT_ENCODING[name]


_KNOWN: dict[tuple[str, str], Any] = {
    (kind.__module__, kind.__qualname__): kind
    for kind in (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
        _MEM_FORMAT_ENCODING,
        _StorageInfo,
        _get_layout,
    )
}
_KNOWN |= {("torch", "Size"): torch.Size, ("builtins", "getattr"): _member}
# the path of the written folder, which is not used; the second name is Python 3.13's
_KNOWN |= {(module, "PosixPath"): Path for module in ("pathlib", "pathlib._local")}


_BUILT = (BytesStorageMetadata, ChunkStorageMetadata, Metadata, MetadataIndex, StorageMeta, TensorProperties,
          TensorStorageMetadata, _StorageInfo)  # fmt: skip


class _MetadataUnpickler(pickle._Unpickler):
    """Based on the unpickler in Python, not in C: with the latter, a pickle could set attributes of the classes
    themselves, which would change them for the whole process."""

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(pickle._Unpickler.dispatch)

    def load_build(self) -> None:
        of = self.stack[-2]  # type: ignore[attr-defined]
        if type(of) not in _BUILT:
            raise pickle.UnpicklingError(f"{METADATA_FILE} sets attributes of {of!r}, which no checkpoint needs")
        super().load_build()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = load_build

    def find_class(self, module: str, name: str) -> Any:
        known = _KNOWN.get((module, name))
        if known is None and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            known = getattr(torch, name)
        if known is None:
            raise pickle.UnpicklingError(f"{METADATA_FILE} asks for {module}.{name}, which no checkpoint needs")
        return known
