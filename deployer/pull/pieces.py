"""The copy of one file: which pieces are missing, where their bytes are written, and when it is complete."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import threading
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from deployer.agent.host.typed import to_json
from deployer.agent.requests.files.view import DIGEST_BYTES
from deployer.agent.requests.files.view import Piece as AskedPiece
from deployer.pull.target import PARTIAL_FOLDER, CannotWrite, PullTarget, digest_of

PIECE_BYTES = 1 << 20
"""Bytes that one hash covers; a broken connection costs at most these."""
GUARD_BYTES = 64 << 10
"""Of a file that has grown, this many last bytes of the local copy are compared before the new bytes are appended."""


BATCH_BYTES = 8 << 20
BATCH_PIECES = 200
BATCH_JSON = 32_000  # of a request, which is one frame; a path alone may take 24 kB


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file as the host lists it; `path` is relative to the job's folder."""

    path: str
    size: int
    mtime_ns: int
    inode: str
    stored: int
    """Bytes on the host's disk: fewer than `size` if the oldest part of a log was dropped."""

    @property
    def unit(self) -> str:
        """The folder that is useful only as a whole: a checkpoint, the export, the traces; empty for other files."""
        parts = self.path.split("/")
        if parts[0] == "checkpoints":
            return "/".join(parts[:2])
        return parts[0] if parts[0] in ("export", "profile") else ""

    @property
    def grows(self) -> bool:
        """Whether a job only ever appends to it."""
        if self.path in ("metrics.jsonl", "samples.jsonl") or self.path.startswith("tensorboard/"):
            return True
        return self.path.startswith("logs/") and self.path.endswith(".log")


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of a file to request."""

    download: Download
    offset: int
    length: int
    have: str | None = None
    """The hash of the local bytes; the host sends only a piece that differs."""
    guard: bool = False
    """Only compared: the new bytes fit only if these are equal."""

    def to_json(self) -> dict[str, object]:
        file = self.download.file
        version = None if file.grows else (file.size, file.mtime_ns)
        piece: dict[str, object] = to_json(
            AskedPiece(file.path, file.inode, self.offset, self.length, version, self.have), sparse=True
        )
        return piece


class Download:
    """The pieces of one file. Many threads may take part; each method is atomic."""

    def __init__(self, file: RemoteFile, pull_target: PullTarget, *, job_id: str, start: int = 0) -> None:
        self.file = file
        self.failure = ""
        """Why the file could not be copied as listed; empty without a failure."""
        self.heals = False
        """A new list may make it possible."""
        self._target = pull_target
        self._start = start  # what comes before is in its place already
        version = [file.inode, start] if file.grows else [file.inode, file.size, file.mtime_ns]
        key = json.dumps([job_id, file.path, version]).encode("ascii")
        name = hashlib.blake2b(key, digest_size=DIGEST_BYTES).hexdigest()
        self._part, self._journal = f"{name}.part", f"{name}.done"
        self._fd = -1
        self._lock = threading.Lock()
        self._missing = max(1, -(-(file.size - start) // PIECE_BYTES))

    @property
    def due_bytes(self) -> int:
        """Bytes that are still missing, according to the journal."""
        left = min(self.file.size - self._start, self.file.stored)
        return max(0, left - self._target.part_size(self._journal) * PIECE_BYTES)

    def pieces(self) -> Iterator[Piece]:
        """Every piece in order; those from an earlier pull carry the hash of the local bytes."""
        if self._start:
            begin = max(0, self._start - GUARD_BYTES)
            have = self._target.digest(self.file.path, begin, self._start - begin)
            yield Piece(self, begin, self._start - begin, have, guard=True)
        for offset in range(self._start, max(self.file.size, self._start + 1), PIECE_BYTES):
            if self.failure:
                return
            length = min(PIECE_BYTES, self.file.size - offset)
            yield Piece(self, offset, length, self._kept(offset, length))

    def _kept(self, offset: int, length: int) -> str | None:
        number = self._number(offset)
        if self._target.part_size(self._journal) <= number:
            return None
        with self._lock:
            journal = self._target.open_part(self._journal)
            try:
                if os.pread(journal, 1, number) != b"\1":
                    return None
                return digest_of(self._open(), offset - self._start, length)
            finally:
                os.close(journal)

    def write(self, piece: Piece, data: bytes, *, at: int) -> None:
        """Writes bytes of a piece, `at` bytes after its start. They count only after `verified`."""
        if piece.guard:
            return
        with self._lock:
            if self.failure:
                return
            if at == 0 and not self._target.has_room():  # whatever the host said of its size
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.pwrite(self._open(), data, piece.offset + at - self._start)

    def write_hole(self, piece: Piece) -> None:
        """Writes zeros for a hole; a part of the file that was never written already reads as zeros."""
        if piece.have is not None:
            self.write(piece, bytes(piece.length), at=0)

    def verified(self, piece: Piece) -> bool:
        """Records that a piece is complete. Returns whether it was the last one and the file was renamed into place."""
        if piece.guard:
            return False
        with self._lock:
            self._missing -= 1
            if self.failure:
                return False
            if self._missing:
                self._note(self._number(piece.offset))
                return False
            os.ftruncate(self._open(), self.file.size - self._start)
            self._close()
        self._settle()
        return True

    def fail(self, reason: str, *, heals: bool = False) -> None:
        """Gives the file up. `heals`: the file has changed since it was listed, so the next round tries it again."""
        with self._lock:
            if self.failure:
                return
            self.failure, self.heals = reason, heals
            self._close()
            if not heals:  # what came of it takes the room of others
                with suppress(OSError):
                    self._target.drop_part(self._part)
                    self._target.drop_part(self._journal)

    def give_up(self, error: OSError | CannotWrite) -> None:
        """Gives the file up because it cannot be written here."""
        self.fail(self._target.why_not(error))

    def _settle(self) -> None:
        file = self.file
        if self._start:
            self._target.append(self._part, file.path, start=self._start, mtime_ns=file.mtime_ns)
        else:
            self._target.publish(self._part, place_of(file), mtime_ns=file.mtime_ns)
        self._target.drop_part(self._journal)

    def _note(self, number: int) -> None:
        journal = self._target.open_part(self._journal)
        try:
            os.pwrite(journal, b"\1", number)
        finally:
            os.close(journal)

    def _number(self, offset: int) -> int:
        return (offset - self._start) // PIECE_BYTES

    def _open(self) -> int:
        if self._fd < 0:
            self._fd = self._target.open_part(self._part)
        return self._fd

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def place_of(file: RemoteFile) -> str:
    """The path for a complete file: a checkpoint's files stay in the hidden folder until all of them are complete."""
    return f"{PARTIAL_FOLDER}/{file.path}" if file.unit.startswith("checkpoints/") else file.path


class Work:
    """The pieces that are still to be fetched; gives them to the worker threads in batches."""

    def __init__(self, downloads: Sequence[Download]) -> None:
        self.lock = threading.RLock()
        self.failure: BaseException | None = None
        self._changed = threading.Condition(self.lock)
        self._pieces = _all_pieces(downloads)
        self._again: deque[Piece] = deque()
        self._doubted: set[tuple[str, int]] = set()
        self._in_flight = 0
        self._exhausted = False

    @property
    def finished(self) -> bool:
        """Whether everything is done, or an error ended the work."""
        with self.lock:
            return self.failure is not None or (self._exhausted and not self._again and not self._in_flight)

    def take(self) -> list[Piece]:
        """The next batch; waits while other threads may return pieces. Empty at the end."""
        with self._changed:
            while not self.finished:
                batch = self._fill()
                if batch:
                    self._in_flight += len(batch)
                    return batch
                self._changed.wait(1.0)
            return []

    def _fill(self) -> list[Piece]:
        batch: list[Piece] = []
        size = text = 0
        while size < BATCH_BYTES and text < BATCH_JSON and len(batch) < BATCH_PIECES:
            piece = self._again.popleft() if self._again else next(self._pieces, None)
            if piece is None:
                self._exhausted = True
                self._changed.notify_all()
                break
            if not piece.download.failure:
                batch.append(piece)
                size += piece.length
                text += len(json.dumps(piece.to_json()))
        return batch

    def done(self) -> None:
        """One piece is not in flight any more, whatever its result."""
        with self._changed:
            self._in_flight -= 1
            self._changed.notify_all()

    def give_back(self, pieces: Collection[Piece]) -> None:
        """Returns pieces that were not received."""
        with self._changed:
            self._in_flight -= len(pieces)
            self._again.extend(pieces)
            self._changed.notify_all()

    def retry(self, piece: Piece) -> bool:
        """Puts a damaged piece back, to fetch it completely. Returns False if this was already done once."""
        with self._changed:
            key = (piece.download.file.path, piece.offset)
            if key in self._doubted:
                return False
            self._doubted.add(key)
            self._again.append(replace(piece, have=None))
            return True

    def fail(self, error: BaseException) -> None:
        """Ends the work with this error."""
        with self._changed:
            self.failure = self.failure or error
            self._changed.notify_all()

    def wake(self) -> None:
        """Wakes waiting threads after a worker has stopped."""
        with self._changed:
            self._changed.notify_all()

    def wait(self) -> None:
        """Waits for a change, or half a second."""
        with self._changed:
            self._changed.wait(0.5)


def _all_pieces(downloads: Sequence[Download]) -> Iterator[Piece]:
    for download in downloads:
        try:
            yield from download.pieces()
        except OSError as error:  # what is here of it cannot be read
            download.give_up(error)
