"""What a launch sends of files: the difference to what the host had, unasked, and whatever else it asks for."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deployer.agent import frames
from deployer.agent.tree import Entry, dump_entries, new_blobs
from deployer.errors import HostError, UsageError
from deployer.lasttree import LastTree
from deployer.link import Call

INLINE_BYTES = 128 << 10
"""News up to this size are kept, to be sent again where the agent was missing; larger ones bring the agent along."""

Progress = Callable[[int, int], None]
"""(bytes sent, bytes in all), called as an upload goes on."""


@dataclass(frozen=True)
class Shipment:
    """The trees that a plan names, and where the content of their files is found on this machine."""

    trees: Mapping[str, tuple[Entry, ...]]
    sources: Mapping[str, str]


@dataclass(frozen=True)
class News:
    """What the host is sent unasked: the list of what has changed, then the blobs that are new with it."""

    list: bytes
    blobs: Mapping[str, int]
    """Content hash -> bytes, in the order in which they travel."""

    @property
    def is_small(self) -> bool:
        return len(self.list) + sum(self.blobs.values()) <= INLINE_BYTES

    def frames(self, sources: Mapping[str, str]) -> Iterator[tuple[dict[str, Any], bytes]]:
        """(head, body) of every frame. UsageError when a file is gone or has changed by now."""
        for start in range(0, len(self.list), frames.MAX_BODY):
            end = start + frames.MAX_BODY
            yield {"news": "end" if end >= len(self.list) else "list"}, self.list[start:end]
        for part in blob_parts(self.blobs, sources):
            yield {}, part


def news_for(last: LastTree | None, name: str, entries: tuple[Entry, ...]) -> News | None:
    """What to send unasked of the tree `name`; None when the host has it, as far as is known here."""
    known = last.name() if last else name
    base = last.entries() if last and known not in (None, name) else ()
    if known == name or (known is not None and not base):
        return None
    put = sorted(set(entries) - set(base))
    gone = sorted({entry.path for entry in base} - {entry.path for entry in entries})
    words = json.dumps({"base": known, "put": [list(entry) for entry in put], "gone": gone}, separators=(",", ":"))
    return News(zlib.compress(words.encode("ascii"), 1), new_blobs(base, put))


def send_tree(call: Call, entries: tuple[Entry, ...]) -> None:
    call.send_data(zlib.compress(dump_entries(entries), 1))
    call.end_data()


def send_news(call: Call, news: News, sources: Mapping[str, str], progress: Progress) -> None:
    """Sends until the host says anything."""
    sent, total = 0, sum(news.blobs.values())
    for head, body in news.frames(sources):
        if call.pending():
            break
        call.send_data(body, **head)
        if not head:
            sent += len(body)
            progress(sent, total)
    call.end_data()


def send_blobs(
    call: Call, hashes: list[str], sources: Mapping[str, str], sizes: Mapping[str, int], progress: Progress
) -> None:
    """Sends what the host asked for. HostError when that is no part of the launch."""
    if unknown := next((h for h in hashes if h not in sizes), None):
        raise HostError(f"the host asks for {unknown!r}, which is no file of this launch")
    blobs = {digest: sizes[digest] for digest in hashes}
    total, sent = sum(blobs.values()), 0
    for part in blob_parts(blobs, sources):
        call.send_data(part)
        sent += len(part)
        progress(sent, total)
    call.end_data()


def blob_parts(blobs: Mapping[str, int], sources: Mapping[str, str]) -> Iterator[bytes]:
    """The blobs one behind the other, cut to the size of frames: both sides know where each one ends."""
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
        path, left = Path(sources[digest]), size
        try:
            with path.open("rb", buffering=0) as f:
                while left and (part := f.read(min(left, 1 << 20))):
                    left -= len(part)
                    yield part
        except OSError as error:
            reason = error.strerror or str(error)
            raise UsageError(f"{path} cannot be read any more: {reason}", hint="deploy again") from error
        if left:
            raise UsageError(f"{path} became shorter while it was being sent", hint="deploy again")
