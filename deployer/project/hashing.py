"""Content hashes of files, and a cache of them by what `stat` says, with git's racy rule."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from pathlib import Path

from deployer.paths import write_whole

_VERSION = 1
_STILL_NS = 2 * 10**9
"""A file must have been still for so long when it was hashed: coarser clocks may hide a change made just after."""


def hash_file(path: bytes) -> tuple[str, int]:
    """(content hash as in `agent.tree`, bytes that were hashed), in one reading. OSError when it cannot be read."""
    digest, size = hashlib.blake2b(digest_size=20), 0
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        while chunk := os.read(descriptor, 1 << 20):
            digest.update(chunk)
            size += len(chunk)
    finally:
        os.close(descriptor)
    return digest.hexdigest(), size


class HashCache:
    """Hashes of one tree's files as of the last time, in a file of `folder` that is named by the tree's root."""

    def __init__(self, folder: Path, root: Path, *, now_ns: int | None = None) -> None:
        self._file = folder / (hashlib.blake2b(os.fsencode(root), digest_size=12).hexdigest() + ".json")
        self._old = self._read()
        self._new: dict[str, list[int | str]] = {}
        self._now_ns = now_ns or time.time_ns()

    def _read(self) -> dict[str, list[int | str]]:
        try:
            content = json.loads(self._file.read_text(encoding="ascii"))
            return dict(content["files"]) if content["version"] == _VERSION else {}
        except (OSError, ValueError, LookupError, TypeError):
            return {}

    def get(self, path: bytes, status: os.stat_result) -> tuple[str, int] | None:
        """(hash, bytes) of a file that is as it was, else None."""
        known = self._old.get(os.fsdecode(path))
        return (str(known[4]), status.st_size) if known and known[:4] == _key(status) else None

    def put(self, path: bytes, status: os.stat_result, digest: str, size: int) -> None:
        """Remembers a hash unless the file changed just now or while it was read; `status` is from before that."""
        still = max(status.st_mtime_ns, status.st_ctime_ns) < self._now_ns - _STILL_NS
        if still and size == status.st_size:
            self._new[os.fsdecode(path)] = [*_key(status), digest]

    def save(self) -> None:
        """Writes what this scan saw; a cache that cannot be written costs time only."""
        if self._new == self._old:
            return
        with contextlib.suppress(OSError):
            write_whole(self._file, json.dumps({"version": _VERSION, "files": self._new}).encode("ascii"))


def _key(status: os.stat_result) -> list[int | str]:
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
