"""`threading` of the simulated Linux: what the agent uses of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.world.linux import kernel as world
from tests.world.linux.calls import kernel, this
from tests.world.linux.channel import Channel
from tests.world.linux.kernel import S


def _deadline(timeout: float | None) -> int | None:
    """Rounded up: whoever waits again for what is left of its time would never come to the end of it otherwise."""
    return None if timeout is None or timeout < 0 else kernel().now_ns + int(timeout * S) + 1


class Lock:
    def __init__(self) -> None:
        self._holder: Any = None
        self._freed = Channel()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if not blocking and timeout != -1:
            raise ValueError("can't specify a timeout for a non-blocking call")
        if timeout < 0 and timeout != -1:
            raise ValueError("timeout value must be a non-negative number")
        if self._holder is not None:
            if not blocking:
                return False
            if not kernel().block(lambda: self._holder is None, self._freed, deadline_ns=_deadline(timeout)):
                return False
        self._holder = kernel().current
        return True

    def release(self) -> None:
        if self._holder is None:
            raise RuntimeError("release unlocked lock")
        self._holder = None
        self._freed.notify()

    def locked(self) -> bool:
        return self._holder is not None

    def is_held(self) -> bool:
        """By whoever may let go of it: here, anybody."""
        return self._holder is not None

    def let_go(self) -> int:
        """How often it was taken, for `take_again`."""
        self.release()
        return 1

    def take_again(self, count: int) -> None:
        self.acquire()

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
        if not self.is_held() and not super().acquire(blocking, timeout):
            return False
        self._count += 1
        return True

    def release(self) -> None:
        if not self.is_held():
            raise RuntimeError("cannot release un-acquired lock")
        self._count -= 1
        if not self._count:
            super().release()

    def is_held(self) -> bool:
        return self._holder is not None and self._holder is kernel().current

    def let_go(self) -> int:
        count, self._count = self._count, 1
        self.release()
        return count

    def take_again(self, count: int) -> None:
        self.acquire()
        self._count = count


class Condition:
    def __init__(self, lock: Any = None) -> None:
        self._lock = lock or RLock()
        self._told = Channel()
        self._waiters: list[object] = []
        self.acquire = self._lock.acquire
        self.release = self._lock.release

    def __enter__(self) -> Any:
        return self._lock.__enter__()

    def __exit__(self, *exc: object) -> None:
        self._lock.__exit__(*exc)

    def wait(self, timeout: float | None = None) -> bool:
        if not self._lock.is_held():
            raise RuntimeError("cannot wait on un-acquired lock")
        me = object()
        self._waiters.append(me)
        count = self._lock.let_go()
        try:
            return kernel().block(lambda: me not in self._waiters, self._told, deadline_ns=_deadline(timeout))
        finally:
            if me in self._waiters:
                self._waiters.remove(me)
            self._lock.take_again(count)

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        ends_ns = _deadline(timeout)
        while not (found := predicate()):
            left = None if ends_ns is None else (ends_ns - kernel().now_ns) / S
            if left is not None and left <= 0:
                return found
            self.wait(left)
        return found

    def notify(self, n: int = 1) -> None:
        if not self._lock.is_held():
            raise RuntimeError("cannot notify on un-acquired lock")
        del self._waiters[:n]
        self._told.notify()

    def notify_all(self) -> None:
        self.notify(len(self._waiters))


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
        self.daemon = current_thread().daemon if daemon is None else daemon
        self._thread: world.Thread | None = None

    def run(self) -> None:
        if self._target is not None:
            self._target(*self._args, **self._kwargs)

    def start(self) -> None:
        if self._thread is not None:
            raise RuntimeError("threads can only be started once")
        process = kernel().step("thread")
        self._thread = process.start_thread(self.run, self, self.daemon)

    def join(self, timeout: float | None = None) -> None:
        thread = self._thread
        if thread is None:
            raise RuntimeError("cannot join thread before it is started")
        if thread is kernel().current:
            raise RuntimeError("cannot join current thread")
        kernel().block(lambda: thread.is_over, thread.ended, deadline_ns=_deadline(timeout))

    def is_alive(self) -> bool:
        return self._thread is not None and not self._thread.is_over


class _MainThread(Thread):
    def __init__(self, thread: world.Thread) -> None:
        self.name, self.daemon, self._thread = "MainThread", False, thread


def main_thread() -> Thread:
    process = this()
    shown: Thread = process.own.setdefault("main thread", _MainThread(process.main))
    return shown


def current_thread() -> Thread:
    current = kernel().current
    assert current is not None
    return current.shown or main_thread()


__all__ = ["Condition", "Event", "Lock", "RLock", "Thread", "current_thread", "main_thread"]
