"""What a supervisor does about its job's logs while the ranks write them: notes when they grew, keeps them in size.

Stdlib only, Python 3.8, Linux.
"""

import time
from typing import Optional

from .logsize import LogLimit
from .logtimes import EVERY_S, TimeIndex, sizes_of


class LogKeeper:
    """Looks after one attempt's log folder."""

    def __init__(self, folder: str, limit_bytes: Optional[int]) -> None:
        self._folder = folder
        self._index = TimeIndex(folder)
        self._limit = LogLimit(folder, limit_bytes) if limit_bytes else None
        self._due = 0.0

    def look(self, *, now: bool = False) -> Optional[str]:
        """Does what is due, at most every EVERY_S unless `now`. A warning for the job's status, once."""
        if time.monotonic() < self._due and not now:
            return None
        self._due = time.monotonic() + EVERY_S
        sizes = sizes_of(self._folder)
        self._index.note(sizes)
        return self._limit.apply(sizes) if self._limit else None
