"""Whether all GPUs of an attempt have been idle for too long.

Stdlib only, Python 3.8, Linux.
"""

import time
from typing import Callable, Dict, List, Optional, Sequence

from ..gpus.utilization import GpuUtilization, UtilizationQuery
from ..host.errors import AgentError

IDLE_BELOW = 5
"""Utilization in percent below which a GPU counts as idle."""
EVERY_S = 10.0


class IdleTime:
    """Seconds during which every reading found all GPUs idle. Time without readings does not count; a busy GPU resets
    it."""

    def __init__(self, every_s: float) -> None:
        self.seconds = 0.0
        self._every_s = every_s
        self._idle_at: Optional[float] = None

    def saw(self, percents: Sequence[int], now: float) -> None:
        """`percents`: the utilization of each GPU; empty if it could not be read."""
        if percents and max(percents) >= IDLE_BELOW:
            self.seconds, self._idle_at = 0.0, None
            return
        if percents and self._idle_at is not None:
            self.seconds += min(now - self._idle_at, 3 * self._every_s)  # who was halted has seen nothing
        self._idle_at = now if percents else None


class IdleGpus:
    """Watches the GPUs of one attempt."""

    def __init__(
        self,
        devices: Sequence[str],
        env: Dict[str, str],
        timeout_s: float,
        *,
        tell: Callable[[str], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`devices`: as they are leased. `tell`: called with a line if they cannot be watched."""
        self.timeout_s = timeout_s
        self.labels: List[str] = []
        self._devices = devices
        self._env = env
        self._tell = tell
        self._now = now
        self._every_s = min(EVERY_S, timeout_s / 6)
        self._idle = IdleTime(self._every_s)
        self._query: Optional[UtilizationQuery] = None
        self._next_at = float("-inf")
        self._told = False
        self._given_up = False

    def look(self) -> bool:
        """Whether the GPUs have been idle for --idle-timeout. Call it often: it does not block."""
        if self._given_up:
            return False
        if self._query is None:
            if self._now() < self._next_at:
                return False
            self._next_at = self._now() + self._every_s
            self._ask()
        answer = self._query.answer() if self._query is not None else None
        if answer is None:
            return False
        self._query = None
        self._take(answer)
        return self._idle.seconds >= self.timeout_s

    def close(self) -> None:
        if self._query is not None:
            self._query.close()

    def _ask(self) -> None:
        missing = why_unwatched(self._devices)
        try:
            query = None if missing else UtilizationQuery(self._env)
        except AgentError as error:
            self._cannot(error.message)
            self._idle.saw((), self._now())
            return
        if query is None or not query.is_possible:
            self._given_up = True
            self._cannot(missing or "the host has no nvidia-smi")
            return
        self._query = query

    def _take(self, answer: Sequence[GpuUtilization]) -> None:
        mine = [use for use in answer if use.uuid in self._devices]
        silent = [use.label for use in mine if use.percent is None]
        if silent:
            self._given_up = True
            self._cannot("nvidia-smi does not tell the use of GPU %s" % ",".join(silent))
            return
        seen = [use.percent for use in mine if use.percent is not None]
        if len(seen) < len(self._devices):
            self._cannot("nvidia-smi gives no answer now")
            seen = []
        else:
            self.labels = [use.label for use in mine]
        self._idle.saw(seen, self._now())

    def _cannot(self, why: str) -> None:
        if not self._told:
            self._told = True
            self._tell("--idle-timeout cannot watch the GPUs: %s" % why)


def why_unwatched(devices: Sequence[str]) -> str:
    """Why the utilization of these devices cannot be read; empty if it can."""
    if not devices:
        return "it is not known which ones are the job's"
    return "of a slice (MIG) no use is told" if any("/" in device for device in devices) else ""
