"""The interface to a host: a byte stream to one command, independent of the transport."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple, Protocol

WRITE_TIMEOUT_S = 60.0
"""Seconds without progress after which a write counts as a lost connection."""
STDERR_KEPT = 64 * 1024


class Limits(NamedTuple):
    """Seconds without an answer from a host after which an operation fails."""

    login_s: float = 30.0
    """For a login without output, from the command to the agent's first message. Start-up files run in this time; one
    that reads from a slow network disk takes 20 s."""
    ping_every_s: float = 10.0
    dead_after_s: float = 35.0
    """For an agent that answers no pings; after it the connection counts as lost."""


class Stream(Protocol):
    """One remote process's stdin and stdout as bytes. One thread may read while another one writes."""

    def read(self, size: int) -> bytes:
        """Reads at least one byte, and blocks until then; b"" at the end. Raises LostConnection if the transport
        broke."""

    def write(self, data: bytes) -> None:
        """Sends all data. Raises LostConnection if the other side accepts nothing for WRITE_TIMEOUT_S."""

    def close_write(self) -> None:
        """Sends an end of file to the process; its output continues."""

    def close(self) -> None:
        """Drops the stream and wakes a blocked `read`. The process is not killed."""

    def stderr_text(self) -> str:
        """The first 64 KiB of stderr so far; the rest is read and dropped."""

    def exit_status(self, timeout_s: float) -> int | None:
        """The process's exit status; None if it does not arrive in time, or never does."""


class Transport(Protocol):
    """A connection to one host."""

    @property
    def description(self) -> str:
        """`root@host:22`, or `this machine`."""

    @property
    def limits(self) -> Limits:
        """The user's limits; known after `connect`."""

    def connect(self) -> None:
        """Connects, unless connected. Raises ConnectError with a hint."""

    def open(self, command: str) -> Stream:
        """Starts one command line; the login shell (SSH) or /bin/sh (local) reads it."""

    def close(self) -> None:
        """Ends the connection and its streams."""


class Drain:
    """Reads a stream in the background, so that it never blocks the other one, and keeps its beginning.

    A separate thread calls `read_some` until b"" and keeps the first 64 KiB. `sift` receives all data, and b"" at the
    end; it returns the part to keep.
    """

    def __init__(self, read_some: Callable[[], bytes], sift: Callable[[bytes], bytes] = bytes) -> None:
        self._read_some = read_some
        self._sift = sift
        self._kept = bytearray()
        self._thread = threading.Thread(target=self._run, name="stderr-drain", daemon=True)
        self._thread.start()

    def text(self) -> str:
        """The text kept so far."""
        return bytes(self._kept).decode("utf-8", "replace")

    def wait(self, timeout_s: float) -> None:
        """Waits for the end of the stream."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        data = b"more"
        while data:
            data = self._read_some()
            self._kept += self._sift(data)[: max(0, STDERR_KEPT - len(self._kept))]
