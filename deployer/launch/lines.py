"""Follows a job's log in one thread and gives its lines to another one, which may stop early."""

from __future__ import annotations

import io
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from deployer.agent.job.status import Status
from deployer.connection.host import GIVE_UP_AFTER_S, Host
from deployer.connection.link import Link
from deployer.launch.follow import Watcher, follow_to_end
from deployer.launch.logview import MAX_LINE, LogView

WAITING = 1000
"""How many lines wait to be read; with more, the host waits."""


class Lines:
    """A job's log as an iterator of lines; after its end, `final` is the job's status. Raises the error that ended it
    otherwise."""

    def __init__(
        self,
        host: Host,
        job_id: str,
        *,
        request: dict[str, Any],
        bare: bool,
        watcher: Watcher,
        give_up_s: float = GIVE_UP_AFTER_S,
    ) -> None:
        self.final: Status | None = None
        self._host = host
        self._error: BaseException | None = None
        self._left = threading.Event()
        self._queue: queue.Queue[str | None] = queue.Queue(WAITING)
        out = LineStream(self._put)
        view = LogView(out, out, terminal=False, bare=bare, escapes=False)

        def follow() -> None:
            try:
                self.final = follow_to_end(
                    self._connect, job_id, view=view, watcher=watcher, request=request, known=True, give_up_s=give_up_s
                )
            except BaseException as error:
                self._error = error
            if not self._left.is_set():
                self._put(None)

        threading.Thread(target=follow, name=f"log of {job_id}", daemon=True).start()

    def __iter__(self) -> Iterator[str]:
        return self.within(None)

    def within(self, timeout_s: float | None) -> Iterator[str]:
        """Every line without its line end. Raises TimeoutError if the log has not ended within `timeout_s`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = None if deadline is None else deadline - time.monotonic()
            if left_s is not None and left_s <= 0:  # a queue that is never empty would give one more, for ever
                raise TimeoutError
            try:
                line = self._queue.get(timeout=left_s)
            except queue.Empty:
                raise TimeoutError from None
            if line is None:
                break
            yield line
        if self._error is not None:
            raise self._error

    def leave(self) -> None:
        """Stops following; the job runs on."""
        self._left.set()
        self._host.close()

    def _connect(self, **how: Any) -> Link:
        if self._left.is_set():
            raise _Left
        return self._host.connect(**how)

    def _put(self, line: str | None) -> None:
        while not self._left.is_set():
            try:
                return self._queue.put(line, timeout=0.2)
            except queue.Full:
                continue
        raise _Left


class _Left(Exception):
    """The reader has stopped taking lines."""


class LineStream(io.BytesIO):
    """A byte stream that passes each complete line on as text."""

    def __init__(self, put: Callable[[str], None]) -> None:
        super().__init__()
        self._put = put
        self._begun = b""

    def write(self, data: Any) -> int:
        *lines, self._begun = (self._begun + bytes(data)).split(b"\n")
        while len(self._begun) > MAX_LINE:  # a line without an end fills no memory
            lines.append(self._begun[:MAX_LINE])
            self._begun = self._begun[MAX_LINE:]
        for line in lines:
            self._put(line.decode("utf-8", "replace"))
        return len(data)
