"""Keeps the beginning of a stream that nobody reads, so that it can never stall the other one."""

from __future__ import annotations

import threading
from collections.abc import Callable

STDERR_KEPT = 64 * 1024


class Drain:
    """Reads with `read_some` until b"" in a thread of its own and keeps the first 64 KiB.

    `sift` sees all that comes, b"" at the end, and returns what of it is to be kept.
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
