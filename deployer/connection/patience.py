"""How long, and how often, a connection that broke is made again."""

from __future__ import annotations

import time
from collections.abc import Callable

from deployer.errors import FerryError, LostConnection

GIVE_UP_AFTER_S = 600.0
"""A broken connection is tried again for so long; the job runs on meanwhile, and afterwards."""
BACKOFF_S = (0.5, 1.0, 2.0, 5.0, 10.0)

Tell = Callable[[str], None]


class Patience:
    """Back-off over connections that break; gives up when nothing has come for so long."""

    def __init__(self, tell: Tell, *, give_up_after_s: float = GIVE_UP_AFTER_S) -> None:
        self._tell = tell
        self._give_up_after_s = give_up_after_s
        self._tries = 0
        self._last = time.monotonic()

    def progressed(self) -> None:
        """Something has come: the next break is a new one."""
        self._tries, self._last = 0, time.monotonic()

    def wait(self, error: FerryError) -> None:
        """Waits before the next try. Raises the error, as LostConnection, when it was the last one."""
        if time.monotonic() - self._last > self._give_up_after_s:
            raise LostConnection(error.message, where=error.where, hint=error.hint) from error
        if not self._tries:
            self._tell(f"{error.message}; trying again")
        wait_s = BACKOFF_S[min(self._tries, len(BACKOFF_S) - 1)]
        self._tries += 1
        time.sleep(wait_s)
