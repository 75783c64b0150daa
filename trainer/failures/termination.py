"""SIGTERM outside the training loop, on several nodes: it must not end a rank that is about to say which node is lost.

If the node with torch's store is lost, torchrun on the other nodes notices at once and sends SIGTERM to its ranks. They
have 30 s then, and the watchdog needs 20 s. Inside the loop SIGTERM only asks the run to stop.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from trainer.failures.watchdog import Watchdog, leave

ANSWER_S = 3.0
"""Seconds for the store to answer the watchdog, which asks once a second."""


@contextmanager
def outlasting_sigterm(watchdog: Watchdog | None, *, several: bool) -> Iterator[None]:
    """Until the block ends, SIGTERM ends this process only if torch's store answers; else the watchdog will do it."""
    if watchdog is None or not several:
        yield
        return

    def decide() -> None:
        if watchdog.hears_store(ANSWER_S):
            leave(128 + signal.SIGTERM)

    def handle(number: int, frame: FrameType | None) -> None:
        threading.Thread(target=decide, name="sigterm", daemon=True).start()

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
