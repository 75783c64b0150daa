"""The utilization of each GPU according to nvidia-smi, read in the background.

Stdlib only, Python 3.8, Linux.
"""

import os
import time
from typing import Dict, List, NamedTuple, Optional

from ..host.layout import RUN_DIR_ENV, SUPERVISOR_ENV
from .nvidia import CSV, TIMEOUT_S, start_smi

_FIELDS = "--query-gpu=index,uuid,utilization.gpu"
_MOST_BYTES = 1 << 20


class GpuUtilization(NamedTuple):
    """`percent`: None if the driver does not report it, for example for a GPU in MIG mode."""

    label: str
    uuid: str
    percent: Optional[int]


def parse_utilization(text: str) -> List[GpuUtilization]:
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.count(",") == 2]
    return [GpuUtilization(index, uuid, _percent(use)) for index, uuid, use in rows if index.isdigit()]


def _percent(cell: str) -> Optional[int]:
    return int(cell) if cell.isdigit() and len(cell) < 4 else None


class UtilizationQuery:
    """One nvidia-smi query that runs in the background. Its process is not marked as the job's, so a sweep does not end
    it."""

    def __init__(self, env: Dict[str, str]) -> None:
        """Raises AgentError if nvidia-smi cannot be started."""
        own = {name: value for name, value in env.items() if name != SUPERVISOR_ENV}
        # its mark says that it belongs to no job, so no sweep ends or counts it
        self._program = start_smi({**own, RUN_DIR_ENV: os.devnull}, _FIELDS, CSV)
        self._text = b""
        self._until = time.monotonic() + TIMEOUT_S
        if self._program is not None and self._program.stdout is not None:
            os.set_blocking(self._program.stdout.fileno(), False)

    @property
    def is_possible(self) -> bool:
        """Whether the host has nvidia-smi."""
        return self._program is not None

    def answer(self) -> Optional[List[GpuUtilization]]:
        """None until there is an answer; empty if the query failed."""
        if self._program is None or self._program.stdout is None:
            return []
        try:
            data = os.read(self._program.stdout.fileno(), 1 << 16)
        except BlockingIOError:
            if time.monotonic() < self._until:
                return None
            self.close()
            return []
        self._text += data
        if data and len(self._text) < _MOST_BYTES:
            return None
        self.close()
        return parse_utilization(self._text.decode("utf-8", "replace"))

    def close(self) -> None:
        """Kills the nvidia-smi process if it still runs."""
        program, self._program = self._program, None
        if program is not None and program.stdout is not None:
            program.kill()  # of one that has ended nothing
            program.stdout.close()
            program.poll()
