"""Filters a log's chunks: the complete lines that match a pattern, each at its own offset.

Stdlib only, Python 3.8: this package runs on the host.
"""

import re
from typing import Dict, List, NamedTuple, Set

from ..host.errors import AgentError
from .read import Chunk

LINE_BYTES = 256 << 10
"""Of a longer line, only this many bytes are searched and shown."""


class Match(NamedTuple):
    file: str
    offset: int
    data: bytearray  # whole lines, one after the other
    cut: bool  # the last one goes on: it was longer than LINE_BYTES


class LineFilter:
    """Takes chunks in order and returns lines as soon as they are complete."""

    def __init__(self, pattern: str) -> None:
        """Raises AgentError if the pattern is not a valid regular expression."""
        try:
            self._search = re.compile(pattern.encode("utf-8", "surrogateescape")).search
        except (re.error, OverflowError, RecursionError) as error:
            raise AgentError("usage", "--grep %r is no regular expression: %s" % (pattern, error))
        self._pending: Dict[str, bytes] = {}  # a line's beginning, just before _next
        self._next: Dict[str, int] = {}  # the offset that follows what has come
        self._inside_long: Set[str] = set()  # the rest of this line is passed over

    def feed(self, chunk: Chunk) -> List[Match]:
        found: List[Match] = []
        if self._next.get(chunk.file, chunk.offset) != chunk.offset:  # a part was dropped between
            self._take_pending(chunk.file, found)
            self._inside_long.discard(chunk.file)
        self._next[chunk.file] = chunk.offset + len(chunk.data)
        before = self._pending.pop(chunk.file, b"")
        self._lines(chunk.file, chunk.offset - len(before), before + chunk.data, found)
        return found

    def end(self) -> List[Match]:
        """The last lines, which have no line end."""
        found: List[Match] = []
        for file in list(self._pending):
            self._take_pending(file, found)
        return found

    def _take_pending(self, file: str, found: List[Match]) -> None:
        rest = self._pending.pop(file, b"")
        if rest:
            self._take(Chunk(file, self._next[file] - len(rest), rest), found)

    def _lines(self, file: str, offset: int, text: bytes, found: List[Match]) -> None:
        position = 0
        while True:
            end = text.find(b"\n", position) + 1
            if not end:
                break
            if file in self._inside_long:
                self._inside_long.discard(file)
            else:
                self._take(Chunk(file, offset + position, text[position:end]), found)
            position = end
        rest = text[position:]
        if file in self._inside_long or not rest:
            return
        if len(rest) > LINE_BYTES:
            self._inside_long.add(file)
            self._take(Chunk(file, offset + position, rest), found)
        else:
            self._pending[file] = rest

    def _take(self, line: Chunk, found: List[Match]) -> None:
        data, cut = line.data[:LINE_BYTES], len(line.data) > LINE_BYTES
        if self._search(data.rstrip(b"\r\n")) is None:
            return
        last = found[-1] if found else None
        if last and not last.cut and (last.file, last.offset + len(last.data)) == (line.file, line.offset):
            last.data.extend(data)
            found[-1] = last._replace(cut=cut)
        else:
            found.append(Match(line.file, line.offset, bytearray(data), cut))
