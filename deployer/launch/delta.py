"""What a launch sends of files: first the difference to the host's last tree, then whatever else the host asks for.

This client stores the last tree of each project on each host.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deployer.agent.host.files import read_whole
from deployer.agent.host.typed import InvalidData, to_json
from deployer.agent.store.tree import Changes, Entry, dump_entries, load_entries, new_blobs, root_hash, unpacked
from deployer.agent.wire import frames
from deployer.connection.call import Call
from deployer.errors import HostError, UsageError
from deployer.paths import state_dir, write_whole

INLINE_BYTES = 128 << 10
"""A delta up to this size is kept, to send it again if the host lacks the agent. With a larger one the agent is sent
too."""

FAST_BYTES_S = 15e6
"""Bytes per second from which zlib saves little: it needs processor time on both sides."""
POOR_PAUSE = 8
"""How many frames are sent uncompressed after one that could not be compressed."""

Progress = Callable[[int, int], None]
"""Called during an upload with (bytes sent, bytes in all)."""


@dataclass(frozen=True)
class TreeDelta:
    """What a launch sends without being asked: the list of changes, then the new contents."""

    list: bytes
    blobs: Mapping[str, int]
    """Content hash -> bytes, in the order in which they are sent."""

    @property
    def size_bytes(self) -> int:
        """Total size of the blobs."""
        return sum(self.blobs.values())

    @property
    def is_small(self) -> bool:
        return len(self.list) + self.size_bytes <= INLINE_BYTES

    def list_frames(self) -> Iterator[tuple[dict[str, Any], bytes]]:
        """The frames of the list, as (head, body)."""
        for start in range(0, len(self.list), frames.MAX_BODY):
            end = start + frames.MAX_BODY
            yield {"news": "end" if end >= len(self.list) else "list"}, self.list[start:end]

    def frames(self, sources: Mapping[str, str]) -> Iterator[tuple[dict[str, Any], bytes]]:
        """(head, body) of every frame. Raises UsageError if a file is gone or has changed since it was hashed."""
        yield from self.list_frames()
        for part in blob_parts(self.blobs, sources):
            yield squeezed(part)


def delta_for(last: KnownTree | None, name: str, entries: tuple[Entry, ...]) -> TreeDelta | None:
    """What to send of the tree `name` without being asked. None if the host has it, as far as this client knows, or if
    its last tree cannot be read here."""
    known = last.name() if last else name
    base = last.entries() if last and known not in (None, name) else ()
    if known == name or (known is not None and not base):
        return None
    put = sorted(set(entries) - set(base))
    gone = sorted({entry.path for entry in base} - {entry.path for entry in entries})
    words = json.dumps(to_json(Changes(known, put, gone)), separators=(",", ":"))
    return TreeDelta(zlib.compress(words.encode("ascii"), 1), new_blobs(base, put))


def send_tree(call: Call, entries: tuple[Entry, ...]) -> None:
    call.send_data(zlib.compress(dump_entries(entries), 1))
    call.end_data()


def send_delta(call: Call, delta: TreeDelta, sources: Mapping[str, str], progress: Progress) -> None:
    """Sends the delta until the host answers."""
    for head, body in delta.list_frames():
        call.send_data(body, **head)
    _send_parts(call, delta.blobs, sources, progress, until=call.pending)


def send_blobs(
    call: Call, hashes: list[str], sources: Mapping[str, str], sizes: Mapping[str, int], progress: Progress
) -> None:
    """Sends the files that the host asked for. Raises HostError if one of them does not belong to the launch."""
    if unknown := next((h for h in hashes if h not in sizes), None):
        raise HostError(f"the host asks for {unknown!r}, which is no file of this launch")
    _send_parts(call, {digest: sizes[digest] for digest in hashes}, sources, progress, until=lambda: False)


def _send_parts(
    call: Call,
    blobs: Mapping[str, int],
    sources: Mapping[str, str],
    progress: Progress,
    *,
    until: Callable[[], bool],
) -> None:
    """Sends the blobs until all are sent or `until()` is true; compresses them if the connection is slow."""
    total, sent, poor, begun = sum(blobs.values()), 0, 0, time.monotonic()
    for part in blob_parts(blobs, sources):
        if until():
            break
        if poor or sent > FAST_BYTES_S * (time.monotonic() - begun):
            poor = max(0, poor - 1)
            call.send_data(part)
        else:
            head, body = squeezed(part)
            poor = 0 if head else POOR_PAUSE
            call.send_data(body, **head)
        sent += len(part)
        progress(sent, total)
    call.end_data()


def squeezed(part: bytes) -> tuple[dict[str, Any], bytes]:
    """Head and body of a frame, compressed if that saves a tenth."""
    small = zlib.compress(part, 1)
    return ({"z": 1}, small) if len(small) < 0.9 * len(part) else ({}, part)


def blob_parts(blobs: Mapping[str, int], sources: Mapping[str, str]) -> Iterator[bytes]:
    """The contents one after another, in parts of a frame's size: both sides know where each one ends."""
    held = bytearray()
    for part in _contents(blobs.items(), sources):
        held += part
        while len(held) >= frames.MAX_BODY:
            yield bytes(held[: frames.MAX_BODY])
            del held[: frames.MAX_BODY]
    if held:
        yield bytes(held)


def _contents(blobs: Iterable[tuple[str, int]], sources: Mapping[str, str]) -> Iterator[bytes]:
    for digest, size in blobs:
        path, left = sources[digest], size
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                while left and (part := os.read(descriptor, min(left, 1 << 20))):
                    left -= len(part)
                    yield part
            finally:
                os.close(descriptor)
        except OSError as error:
            reason = error.strerror or str(error)
            raise UsageError(f"{path} cannot be read any more: {reason}", hint="deploy again") from error
        if left:
            raise UsageError(f"{path} became shorter while it was being sent", hint="deploy again")


# --- the host's last tree ---------------------------------------------------------------------------------------------

MAX_BYTES = 4 << 20
"""A longer list of files is not stored: such a launch asks the host, as if nothing were known."""
KEPT = 64
"""How many trees are stored, the latest ones; one for each project and host."""
_NAME_SIZE = 40
_NAME = re.compile(rb"[0-9a-f]{40}\Z")


@dataclass(frozen=True)
class KnownTree:
    """The tree that one project last had on one host."""

    file: Path

    @staticmethod
    def of(ssh: str | None, root: str, project: Path) -> KnownTree:
        key = "\0".join([ssh or "", root, str(project)])
        digest = hashlib.blake2b(os.fsencode(key), digest_size=16).hexdigest()
        return KnownTree(state_dir() / "trees" / digest)

    def name(self) -> str | None:
        """The tree's root hash; None if nothing of the project was ever sent to the host."""
        try:
            name = read_whole(str(self.file), _NAME_SIZE)
        except OSError:
            return None
        return name.decode("ascii") if _NAME.match(name) else None

    def entries(self) -> tuple[Entry, ...]:
        """The tree's files; empty if they are not known."""
        try:
            data = read_whole(str(self.file), MAX_BYTES)
            entries = tuple(load_entries(unpacked(data[_NAME_SIZE:])))
        except (OSError, InvalidData):
            return ()
        return entries if root_hash(entries).encode("ascii") == data[:_NAME_SIZE] else ()

    def remember(self, name: str, entries: tuple[Entry, ...]) -> None:
        """Stores what the host has now."""
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
