"""Stores blobs as they arrive: one after another in an order that both sides know, split into frames anywhere.

Stdlib only, Python 3.8: this package runs on the host.
"""

import os
import queue
import shutil
import threading
from typing import Collection, Dict, Iterator, List, Optional, Sequence, Tuple

from ..host.disk import fail
from ..host.errors import AgentError
from .blob import BlobWriter, not_announced
from .content import Store
from .packs import PackWriter
from .spare import Spare
from .tree import LINK, Entry, content_hash
from .tree_files import make_folders, write_file

SMALL_BYTES = 1 << 20
"""A blob up to this size is kept in memory, and goes into a pack if there are many."""
PACK_FROM = 32
"""Fewer small blobs than this go into the store one by one."""

WRITER_THREADS = 4
MAX_WAITING = 32
"""Maximum number of small blobs in memory that no thread has written yet."""

Blob = Tuple[str, int]  # content hash, bytes


class TreeWriter:
    """Writes a tree's files while their blobs arrive, so that the job's copy does not need to read them again.

    Creating a file takes 0.7 ms of kernel time on some disks, so several threads do it.
    """

    def __init__(self, store: Store, entries: Sequence[Entry]) -> None:
        self._folder = store.aside("arrival")
        self._entries: Dict[str, List[Entry]] = {}
        self._written: List[Entry] = []
        self._failure: Optional[OSError] = None
        for entry in entries:
            if entry.mode != LINK:
                self._entries.setdefault(entry.hash, []).append(entry)
        make_folders(os.path.join(self._folder, "tree"), entries)
        self._waiting: queue.Queue[Optional[Tuple[str, bytes]]] = queue.Queue(MAX_WAITING)
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(WRITER_THREADS)]
        for thread in self._threads:
            thread.start()

    def write(self, digest: str, data: bytes) -> None:
        """Queues the files of a blob for writing. Raises OSError if an earlier one could not be written."""
        if self._failure is not None:
            raise self._failure
        self._waiting.put((digest, data))

    def finish(self) -> Spare:
        """Waits for the threads and returns the written files. Raises AgentError if a file could not be written."""
        self._end()
        if self._failure is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            fail(self._failure.filename or self._folder, self._failure)
        return Spare(self._folder, self._written, untouched=True)

    def abort(self) -> None:
        self._end()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _end(self) -> None:
        for _ in self._threads:
            self._waiting.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        for digest, data in iter(self._waiting.get, None):
            try:
                for entry in self._entries.get(digest, ()):
                    write_file(os.path.join(self._folder, "tree", entry.path), data, entry.mode)
                    self._written.append(entry)
            except OSError as error:
                self._failure = self._failure or error  # the rest is taken off the queue, so that nobody waits for ever


class Intake:
    """Puts a stream of `blobs` into the store: those in `wanted`; ignores the others.

    Raises AgentError like Store.writer and BlobWriter. After an error, or if the stream breaks, call `abort`.
    """

    def __init__(
        self, store: Store, blobs: Sequence[Blob], wanted: Collection[str], tree_writer: Optional[TreeWriter] = None
    ) -> None:
        small = sum(size <= SMALL_BYTES for digest, size in blobs if digest in wanted)
        self._store = store
        self._wanted = wanted
        self._tree_writer = tree_writer
        self._pack: Optional[PackWriter] = PackWriter(store.root) if small >= PACK_FROM else None
        self._coming: Iterator[Blob] = iter(blobs)
        self._blob = next(self._coming, None)
        self._held = bytearray()  # of a small blob
        self._left = self._blob[1] if self._blob else 0
        self._writer: Optional[BlobWriter] = None
        store.check_room(sum(size for digest, size in blobs if digest in wanted))

    def feed(self, data: bytes) -> None:
        """Takes the next bytes of the stream. Empty bytes complete the empty blobs at its end."""
        view = memoryview(data)
        while self._blob is not None:
            part, view = view[: self._left], view[self._left :]
            self._take(part)
            self._left -= len(part)
            if self._left:
                return
            self._complete()
        if view:
            raise AgentError("host", "more file content arrived than was announced")

    def finish(self) -> bool:
        """Publishes the received blobs. Returns whether all have arrived."""
        self.feed(b"")
        try:
            if self._pack is not None:
                self._pack.publish()
                self._store.packs.look_again()
        except OSError as error:
            fail(error.filename or self._store.root.packs, error)
        if self._writer is not None:
            self._writer.abort()
        return self._blob is None

    def abort(self) -> None:
        """Discards everything received so far."""
        if self._writer is not None:
            self._writer.abort()
        if self._pack is not None:
            self._pack.abort()
        if self._tree_writer is not None:
            self._tree_writer.abort()

    def _take(self, part: memoryview) -> None:
        digest, size = self._blob or ("", 0)
        if digest not in self._wanted:
            return
        if size <= SMALL_BYTES:
            self._held += part
            return
        if self._writer is None:
            self._writer = self._store.writer(digest, size)
        self._writer.write(part)

    def _complete(self) -> None:
        digest = self._blob[0] if self._blob else ""
        if self._writer is not None:
            self._writer.finish()
        elif digest in self._wanted:
            self._keep(digest, bytes(self._held))
        self._writer = None
        self._held.clear()
        self._blob = next(self._coming, None)
        self._left = self._blob[1] if self._blob else 0

    def _keep(self, digest: str, data: bytes) -> None:
        if self._pack is None:
            writer = self._store.writer(digest, len(data))
            writer.write(data)
            writer.finish()
        elif content_hash(data) != digest:
            raise not_announced(digest, len(data), len(data))
        else:
            self._add_to_pack(self._pack, digest, data)

    def _add_to_pack(self, pack: PackWriter, digest: str, data: bytes) -> None:
        try:
            pack.add(digest, data)
            if self._tree_writer is not None:
                self._tree_writer.write(digest, data)
        except OSError as error:
            fail(error.filename or self._store.root.tmp, error)
