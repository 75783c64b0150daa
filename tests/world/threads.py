"""`threading` of the simulated Linux: what the agent uses of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from tests.world import kernel as world
from tests.world.calls import kernel, this
from tests.world.kernel import Channel, S


def _deadline(timeout: float | None) -> int | None:
    return None if timeout is None or timeout < 0 else kernel().now_ns + int(timeout * S)


class Lock:
    def __init__(self) -> None:
        self._holder: Any = None
        self._freed = Channel()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        current = kernel().current
        if self._holder is not None:
            if not blocking:
                return False
            if not kernel().block(lambda: self._holder is None, self._freed, deadline_ns=_deadline(timeout)):
                return False
        self._holder = current
        return True

    def release(self) -> None:
        if self._holder is None:
            raise RuntimeError("release unlocked lock")
        self._holder = None
        self._freed.notify()

    def locked(self) -> bool:
        return self._holder is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exc: object) -> None:
        self.release()


class RLock(Lock):
    """Of one holder at a time, who may take it again."""

    def __init__(self) -> None:
        super().__init__()
        self._count = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._holder is not kernel().current and not super().acquire(blocking, timeout):
            return False
        self._count += 1
        return True

    def release(self) -> None:
        self._count -= 1
        if not self._count:
            super().release()


class Condition:
    def __init__(self, lock: Any = None) -> None:
        self._lock = lock or Lock()
        self._told = Channel()
        self._round = 0
        self.acquire = self._lock.acquire
        self.release = self._lock.release

    def __enter__(self) -> Any:
        return self._lock.__enter__()

    def __exit__(self, *exc: object) -> None:
        self._lock.__exit__(*exc)

    def wait(self, timeout: float | None = None) -> bool:
        before = self._round
        self._lock.release()
        try:
            return kernel().block(lambda: self._round != before, self._told, deadline_ns=_deadline(timeout))
        finally:
            self._lock.acquire()

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        ends_ns = _deadline(timeout)
        while not (found := predicate()):
            left = None if ends_ns is None else (ends_ns - kernel().now_ns) / S
            if left is not None and left <= 0:
                return found
            self.wait(left)
        return found

    def notify(self, n: int = 1) -> None:
        self._round += 1
        self._told.notify()

    def notify_all(self) -> None:
        self.notify()


class Event:
    def __init__(self) -> None:
        self._is_set = False
        self._changed = Channel()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._changed.notify()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._is_set:
            kernel().step("wait")
            kernel().block(lambda: self._is_set, self._changed, deadline_ns=_deadline(timeout))
        return self._is_set


class Thread:
    def __init__(
        self,
        group: None = None,
        target: Callable[..., Any] | None = None,
        name: str | None = None,
        args: Any = (),
        kwargs: Any = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self._target = target
        self._args = args
        self._kwargs = kwargs or {}
        self.name = name or "thread"
        self.daemon = daemon
        self._thread: world.Thread | None = None

    def run(self) -> None:
        if self._target is not None:
            self._target(*self._args, **self._kwargs)

    def start(self) -> None:
        process = kernel().step("thread")
        name = self.name if self.name != "main" else "thread"
        self._thread = process.start_thread(self.run, name)

    def join(self, timeout: float | None = None) -> None:
        thread = self._thread
        if thread is not None:
            kernel().block(lambda: thread.is_over, thread.ended, deadline_ns=_deadline(timeout))

    def is_alive(self) -> bool:
        return self._thread is not None and not self._thread.is_over


__all__ = ["Condition", "Event", "Lock", "RLock", "Thread", "this", "threading"]
