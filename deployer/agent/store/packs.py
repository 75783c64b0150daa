"""The small blobs of one upload in one file, until a background process writes them as single files.

Creating a file costs a host's disk more than writing it: a first launch would create every file twice, once for the
store and once for the job. A pack contains the blobs one after another, then its index as JSON, then the index's size.

Stdlib only, Python 3.8: this package runs on the host.
"""

import json
import os
import struct
from typing import Dict, List, NamedTuple, Optional, Tuple

from ..host.layout import Root
from ..host.typed import InvalidData, as_row, parse, to_json

_LENGTH = struct.Struct(">Q")
MAX_INDEX = 64 << 20


@as_row
class _Part(NamedTuple):
    """A blob's place in a pack."""

    start: int
    size: int


class PackWriter:
    """Takes blobs; `publish` adds all of them to the store at once, by a rename. Raises OSError if the disk refuses."""

    def __init__(self, root: Root) -> None:
        os.makedirs(root.tmp, mode=0o700, exist_ok=True)
        name = "%d-%s" % (os.getpid(), os.urandom(8).hex())
        self._path = os.path.join(root.packs, name)
        self._temporary = os.path.join(root.tmp, "pack-" + name)
        self._index: Dict[str, _Part] = {}
        self._size = 0
        self._file = os.fdopen(
            os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb", 1 << 20
        )

    def add(self, digest: str, data: bytes) -> None:
        self._file.write(data)
        self._index[digest] = _Part(self._size, len(data))
        self._size += len(data)

    def publish(self) -> None:
        text = json.dumps(to_json(self._index)).encode("ascii")
        self._file.write(text + _LENGTH.pack(len(text)))
        self._file.close()
        os.makedirs(os.path.dirname(self._path), mode=0o700, exist_ok=True)
        os.replace(self._temporary, self._path)

    def abort(self) -> None:
        """Discards the blobs; safe after `publish`."""
        for undo in (self._file.close, lambda: os.unlink(self._temporary)):
            try:
                undo()
            except OSError:
                pass  # a full disk again, for what was still buffered; or there is nothing left to remove


class _PackSpan(NamedTuple):
    path: str
    fd: int
    start: int
    size: int


class Packs:
    """The content of a root's packs at the first access. A pack that is removed later stays open."""

    def __init__(self, root: Root) -> None:
        self._folder = root.packs
        self._found: Optional[Dict[str, _PackSpan]] = None

    def size(self, digest: str) -> Optional[int]:
        found = self._blobs().get(digest)
        return found.size if found else None

    def read(self, digest: str) -> Optional[bytes]:
        """A blob's bytes, unchecked; None if no pack has it."""
        found = self._blobs().get(digest)
        return os.pread(found.fd, found.size, found.start) if found else None

    def look_again(self) -> None:
        """Reads the packs again at the next access, because there is a new one."""
        for fd in {place.fd for place in (self._found or {}).values()}:
            os.close(fd)
        self._found = None

    def forget(self, digest: str) -> None:
        """Removes the pack that contains a damaged blob: its other blobs are probably damaged too."""
        path = self._blobs()[digest].path
        self._found = {name: place for name, place in self._blobs().items() if place.path != path}
        os.unlink(path)

    def _blobs(self) -> Dict[str, _PackSpan]:
        if self._found is None:
            found: Dict[str, _PackSpan] = {}
            for name in names(self._folder):
                found.update(_open(os.path.join(self._folder, name)))
            self._found = found
        return self._found

    def __del__(self) -> None:
        self.look_again()


def names(folder: str) -> List[str]:
    """The packs in a folder; empty if the folder does not exist."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _open(path: str) -> Dict[str, _PackSpan]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return {}  # its blobs are in the store by now
    found = {digest: _PackSpan(path, fd, start, size) for digest, start, size in read_index(fd)}
    if not found:
        os.close(fd)
    return found


def read_index(fd: int) -> List[Tuple[str, int, int]]:
    """(digest, offset, size) of each blob of an open pack; empty if a power cut damaged it: then its blobs are
    requested again."""
    try:
        end = os.fstat(fd).st_size - _LENGTH.size
        (length,) = _LENGTH.unpack(os.pread(fd, _LENGTH.size, end))
        if length > min(end, MAX_INDEX):
            return []
        index = parse(os.pread(fd, length, end - length), Dict[str, _Part], most=MAX_INDEX)
    except (OSError, struct.error, InvalidData):
        return []
    parts = [(digest, part.start, part.size) for digest, part in index.items()]
    return parts if all(start + size <= end for _, start, size in parts) else []
