"""Waits for the supervisor's children; no other code does.

The supervisor is the subreaper of all processes that it starts, and `subprocess` would report 0 for a child that was
reaped elsewhere. Stdlib only, Python 3.8, Linux.
"""

import os
import signal
import time
from typing import Dict, Optional

from ..job.ending import exit_code

POLL_S = 0.1
AWAITED = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT}
"""Signals that are blocked in the supervisor and received only by `Children.wait`."""


class Children:
    """Every child of this process, including adopted orphans. Stores the exit codes of the expected ones."""

    def __init__(self) -> None:
        self._codes: Dict[int, Optional[int]] = {}
        self._ended_ns: Dict[int, int] = {}

    def expect(self, pid: int) -> None:
        self._codes[pid] = None

    def code(self, pid: int) -> Optional[int]:
        """The child's exit code, 128 + N for signal N; None while it runs."""
        return self._codes[pid]

    def ended_ns(self, pid: int) -> int:
        """When its end was noticed, by the monotonic clock; 0 while it runs."""
        return self._ended_ns.get(pid, 0)

    def wait(self, timeout_s: float = POLL_S) -> bool:
        """Waits until a child ends or the time is over. Returns True if this process itself got TERM or INT."""
        self.reap()
        info = signal.sigtimedwait(AWAITED, timeout_s)
        self.reap()
        # after SIGSTOP and SIGCONT, Python returns a siginfo that no signal has filled in
        return info is not None and info.si_signo in (signal.SIGTERM, signal.SIGINT)

    def reap(self) -> None:
        while True:
            try:
                pid, wait_status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._codes:
                self._codes[pid] = exit_code(wait_status)
                self._ended_ns[pid] = time.monotonic_ns()
