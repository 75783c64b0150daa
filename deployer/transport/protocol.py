"""The seam to the outside: a byte stream to one command on a host, whoever carries it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple, Protocol

WRITE_TIMEOUT_S = 60.0
"""A write that makes no progress for this long counts as a lost connection."""
STDERR_KEPT = 64 * 1024


class Limits(NamedTuple):
    """How long a host's silence is borne, in seconds."""

    login_s: float = 30.0
    """A login that says nothing, from the command to the agent's first word: start-up files run in between, and one
    that reads from a slow network disk takes 20 s."""
    ping_every_s: float = 10.0
    dead_after_s: float = 35.0
    """Silence of the agent, although pinged, after which the connection counts as lost."""


class Stream(Protocol):
    """One remote process's stdin and stdout as bytes. One thread may read while another one writes."""

    def read(self, size: int) -> bytes:
        """At least one byte, blocking; b"" at the end. LostConnection when the transport broke."""

    def write(self, data: bytes) -> None:
        """Sends all of it. LostConnection when the other side takes nothing for WRITE_TIMEOUT_S."""

    def close_write(self) -> None:
        """The process reads an end of file; its output goes on."""

    def close(self) -> None:
        """Drops the stream and wakes a blocked `read`. The process is not killed."""

    def stderr_text(self) -> str:
        """The first 64 KiB of what came on stderr so far; the rest is drained and dropped."""

    def exit_status(self, timeout_s: float) -> int | None:
        """The process's exit status; None when it does not come within the time, or never does."""


class Transport(Protocol):
    """A connection to one host."""

    @property
    def description(self) -> str:
        """`root@host:22`, or `this machine`."""

    @property
    def limits(self) -> Limits:
        """As the user has set them; known once connected."""

    def connect(self) -> None:
        """Connects unless connected. ConnectError with a hint."""

    def open(self, command: str) -> Stream:
        """Starts one command line, read by the login shell (SSH) or by /bin/sh (local)."""

    def close(self) -> None:
        """Ends the connection and its streams."""


class Drain:
    """Keeps the beginning of a stream that nobody reads, so that it can never stall the other one.

    Reads with `read_some` until b"" in a separate thread and keeps the first 64 KiB. `sift` sees all
    that comes, b"" at the end, and returns what of it is to be kept.
    """

    def __init__(self, read_some: Callable[[], bytes], sift: Callable[[bytes], bytes] = bytes) -> None:
        self._read_some = read_some
        self._sift = sift
        self._kept = bytearray()
        self._thread = threading.Thread(target=self._run, name="stderr-drain", daemon=True)
        self._thread.start()

    def text(self) -> str:
        """What was kept so far."""
        return bytes(self._kept).decode("utf-8", "replace")

    def wait(self, timeout_s: float) -> None:
        """Waits for the end of the stream."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        data = b"more"
        while data:
            data = self._read_some()
            self._kept += self._sift(data)[: max(0, STDERR_KEPT - len(self._kept))]
