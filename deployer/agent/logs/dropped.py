"""Which parts of logs were dropped by their size limit.

Stdlib only, Python 3.8: this package runs on the host.
"""

import os
from contextlib import suppress
from typing import Dict, Tuple

from ..host.typed import InvalidData, read_typed

DROPPED_FILE = "dropped.json"
"""File name -> offset of its first byte that is kept; `log_max_bytes` -> the limit."""
LIMIT_KEY = "log_max_bytes"


class Dropped:
    """The content of dropped.json in one attempt's log folder; reads it again when it has changed."""

    def __init__(self, folder: str) -> None:
        self._path = os.path.join(folder, DROPPED_FILE)
        self._version: Tuple[int, int] = (0, 0)
        self._values: Dict[str, int] = {}

    def first_kept(self, file: str) -> int:
        return self.read().get(file, 0)

    def read(self) -> Dict[str, int]:
        """File name -> first kept offset, and LIMIT_KEY; empty if nothing was dropped."""
        try:
            info = os.stat(self._path)
        except OSError:
            return self._values
        version = (info.st_ino, info.st_mtime_ns)  # it is replaced, never written in place
        if version != self._version:
            self._version = version
            with suppress(OSError, InvalidData):
                self._values = read_typed(self._path, Dict[str, int])
        return self._values
