"""What a host had of a project the last time, remembered here: the next launch sends only the difference, unasked.

It is a guess that saves round trips, and the host checks it: a memory that is wrong or lost costs time only.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import zlib
from dataclasses import dataclass
from pathlib import Path

from deployer.agent.store.tree import Entry, dump_entries, load_entries, root_hash
from deployer.paths import state_dir, write_whole

MAX_BYTES = 4 << 20
"""A longer list of files is not remembered: its launches ask, as if nothing were known."""
KEPT = 64
"""Projects and hosts that are remembered, the latest ones."""
_NAME_SIZE = 40


@dataclass(frozen=True)
class LastTree:
    """The tree that one project last had on one host."""

    file: Path

    @staticmethod
    def of(ssh: str | None, root: str, project: Path) -> LastTree:
        key = "\0".join([ssh or "", root, str(project)])
        digest = hashlib.blake2b(os.fsencode(key), digest_size=16).hexdigest()
        return LastTree(state_dir() / "trees" / digest)

    def name(self) -> str | None:
        """Its root hash; None when nothing of the project was ever sent there."""
        try:
            with self.file.open("rb") as f:
                return f.read(_NAME_SIZE).decode("ascii") or None
        except (OSError, UnicodeError):
            return None

    def entries(self) -> tuple[Entry, ...]:
        """Its files; none when they are not known."""
        try:
            data = self.file.read_bytes()
            entries = tuple(load_entries(zlib.decompress(data[_NAME_SIZE:])))
            return entries if root_hash(entries).encode("ascii") == data[:_NAME_SIZE] else ()
        except (OSError, ValueError, TypeError, zlib.error):
            return ()

    def remember(self, name: str, entries: tuple[Entry, ...]) -> None:
        """Notes what the host has now."""
        with contextlib.suppress(OSError):
            if self.name() == name:
                os.utime(self.file)
                return
            data = name.encode("ascii") + zlib.compress(dump_entries(entries), 1)
            write_whole(self.file, data if len(data) <= MAX_BYTES else name.encode("ascii"))
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        known = sorted(self.file.parent.iterdir(), key=lambda path: path.stat().st_mtime)
        for path in known[:-KEPT]:
            path.unlink()
