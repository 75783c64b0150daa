"""The protocol between client and agent: length-prefixed frames, each with a JSON head and a binary body.

A frame is two unsigned 32-bit big-endian lengths (head, body), the head as a JSON object, then the body; at most 64 KiB
in all. Bytes before the nonce that the client chose are login noise. Both sides read in a separate thread, so that no
side writes while the other one cannot read.

Stdlib only, Python 3.8: this package runs on the host.
"""

import json
import struct
import threading
from typing import Any, BinaryIO, Dict, NamedTuple, Optional

from ..host.typed import InvalidData, from_json, load_json

MAX_FRAME = 64 * 1024
MAX_BODY = 48 * 1024
MAX_NOISE = 256 * 1024
"""Bytes that a login shell may print before the nonce."""
WINDOW = 4 << 20
"""Bytes of a stream that may be sent without an answer: the receiver grants what it has consumed."""

_LENGTHS = struct.Struct(">II")


class ProtocolError(Exception):
    """The other side sent bytes that are not a valid frame, or broke the rules of the protocol."""


class CutError(ProtocolError):
    """The stream ended inside a frame: the connection broke."""


class Control(NamedTuple):
    """The fields of heads that control the conversation, whatever the request is."""

    id: Optional[int] = None
    """The stream's number."""
    op: Optional[str] = None
    """The head is a request with its own parameters."""
    payload: bool = False
    """Further parameters follow in the stream."""
    end: bool = False
    """The end of what the client sends."""
    cancel: bool = False
    grant: Optional[int] = None
    """Bytes of the stream that may be sent in addition to earlier grants."""
    ping: Optional[int] = None
    pong: Optional[int] = None
    event: Optional[str] = None
    json: bool = False
    """The body is a part of an event's value."""
    data: bool = False
    """The body is bytes of the answer."""
    need: Optional[str] = None


class Frame(NamedTuple):
    head: Dict[str, Any]
    body: bytes
    control: Control = Control()


def encode(head: Dict[str, Any], body: bytes = b"") -> bytes:
    """The bytes of a frame. Raises ValueError if head and body exceed MAX_FRAME."""
    text = json.dumps(head, separators=(",", ":")).encode("ascii")
    if len(text) + len(body) > MAX_FRAME:
        raise ValueError("a frame of %d bytes exceeds %d" % (len(text) + len(body), MAX_FRAME))
    return _LENGTHS.pack(len(text), len(body)) + text + body


def read_frame(stream: BinaryIO) -> Optional[Frame]:
    """The next frame; None at the end of the stream. Raises ProtocolError if the stream ends inside a frame, or a
    length exceeds MAX_FRAME."""
    lengths = _read_exactly(stream, _LENGTHS.size)
    if not lengths:
        return None
    if len(lengths) < _LENGTHS.size:
        raise CutError("the stream ended inside a frame")
    head_size, body_size = _LENGTHS.unpack(lengths)
    if head_size + body_size > MAX_FRAME:
        raise ProtocolError(
            "a frame of %d bytes is announced, at most %d are allowed" % (head_size + body_size, MAX_FRAME)
        )
    data = _read_exactly(stream, head_size + body_size)
    if len(data) < head_size + body_size:
        raise CutError("the stream ended inside a frame")
    try:
        head = load_json(data[:head_size])
        return Frame(head, data[head_size:], from_json(head, Control))
    except InvalidData as damage:
        raise ProtocolError("a frame's head is not understood: %s" % damage) from None


def _read_exactly(stream: BinaryIO, size: int) -> bytes:
    parts = []
    while size > 0:
        part = stream.read(size)
        if not part:
            break
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


class Window:
    """The number of bytes of one stream that its sender may still send; `take` waits for the receiver's grants."""

    def __init__(self, size: int = WINDOW) -> None:
        self._free = size
        self._closed = False
        self._changed = threading.Condition()

    def take(self, size: int, *, timeout_s: Optional[float]) -> None:
        """Waits until `size` bytes may be sent. Raises ProtocolError if no grant arrives within `timeout_s` (None: no
        limit) or the stream was closed."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._free >= size or self._closed, timeout_s):
                raise ProtocolError("the other side took no data for %g s" % (timeout_s or 0))
            if self._closed:
                raise ProtocolError("the stream was closed")
            self._free -= size

    def grant(self, size: int) -> None:
        with self._changed:
            self._free += size
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
