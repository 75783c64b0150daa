"""The seam to the outside: a byte stream to one command on a host, whoever carries it."""

from __future__ import annotations

from typing import Protocol

WRITE_TIMEOUT_S = 60.0
"""A write that makes no progress for so long counts as a lost connection."""


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
    """A way to one host."""

    @property
    def description(self) -> str:
        """`root@host:22`, or `this machine`."""

    def connect(self) -> None:
        """Connects unless connected. ConnectError with a hint."""

    def open(self, command: str) -> Stream:
        """Starts one command line, read by the login shell (SSH) or by /bin/sh (local)."""

    def close(self) -> None:
        """Ends the connection and its streams."""
