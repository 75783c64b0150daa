"""What the trainer uses of the standard library beyond the agent, on top of the simulated Linux."""

from __future__ import annotations

import concurrent.futures._base as base
import errno
import os
import select
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any

import greenlet

from tests.world.linux.calls import kernel, this
from tests.world.linux.inodes import Inode, OpenFile
from tests.world.linux.kernel import Killed
from tests.world.linux.modules import MODULES, OS, THREADING, TIME, _with_ours
from tests.world.linux.threads import Condition, Thread
from tests.world.trainer import sockets
from tests.world.trainer.paths import Path

FUTURES: Any = _with_ours(base, threading=THREADING, time=TIME)


class Pool:
    """As concurrent.futures.ThreadPoolExecutor: its threads live until it is shut down, or the process ends."""

    def __init__(self, workers: int, thread_name_prefix: str = "", initializer: Any = None) -> None:
        self._workers = workers
        self._tasks: list[tuple[Any, Callable[[], Any]]] = []
        self._changed = Condition()
        self._threads: list[Thread] = []
        self._idle = 0
        self._is_over = False
        this().own.setdefault("pools", []).append(self)

    def submit(self, function: Callable[..., Any], *args: Any) -> Any:
        future = FUTURES.Future()
        with self._changed:
            if self._is_over:
                raise RuntimeError("cannot schedule new futures after shutdown")
            self._tasks.append((future, lambda: function(*args)))
            self._changed.notify()
            starts = self._idle < len(self._tasks) and len(self._threads) < self._workers
        if starts:
            thread = Thread(target=self._work, name="pool", daemon=False)
            self._threads.append(thread)
            thread.start()
        return future

    def _work(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                while not self._tasks and not self._is_over:
                    self._changed.wait()
                self._idle -= 1
                if not self._tasks:
                    return
                future, act = self._tasks.pop(0)
            future.set_running_or_notify_cancel()
            try:
                found = act()
            except (Killed, greenlet.GreenletExit):
                raise
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(found)

    def shutdown(self, wait: bool = True) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        for thread in self._threads if wait else ():
            thread.join()


def end_pools() -> None:
    """What Python does when the main thread is through."""
    for pool in this().own.get("pools", []):
        pool.shutdown()


class OwnList:
    """A list of a module that each process has for itself."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _own(self) -> list[Any]:
        found: list[Any] = this().own.setdefault(self._name, [])
        return found

    def append(self, item: Any) -> None:
        self._own().append(item)

    def pop(self) -> Any:
        return self._own().pop()

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self._own()))

    def __len__(self) -> int:
        return len(self._own())


class OwnCount:
    """As itertools.count, of each process."""

    def __next__(self) -> int:
        own = this().own
        own["count"] = own.get("count", -1) + 1
        return int(own["count"])


class _Sys(type(MODULES["sys"])):  # type: ignore[misc]
    path = ("/opt/torchferry",)
    modules: dict[str, Any] = {}  # noqa: RUF012 - none of the process's own

    def __getattr__(self, name: str) -> Any:
        if name == "argv":
            return this().argv[2:]  # PYTHON -m MODULE …
        if name == "_current_frames":
            return lambda: {0: this()}
        return super().__getattr__(name)


class Log(OpenFile):
    """Where a process's words go: no disk, and whoever wants to hears each line."""

    def __init__(self, hear: Callable[[str], None]) -> None:
        disk = kernel().disk
        inode = disk.find("/dev/null")
        assert inode is not None
        super().__init__(disk, inode, os.O_RDWR, "/dev/null")
        self._hear = hear
        self._rest = ""

    def write(self, data: bytes, offset: int | None = None) -> int:
        *lines, self._rest = (self._rest + data.decode("utf-8", "replace")).split("\n")
        for line in lines:
            self._hear(line)
        return len(data)


def _no_interfaces() -> list[Any]:
    return []


def _changed(name: str, **names: Any) -> types.ModuleType:
    made = types.ModuleType(name)
    made.__dict__.update({**MODULES[name].__dict__, **names})
    return made


def _main_thread() -> Any:
    return types.SimpleNamespace(ident=0)


def make_modules() -> dict[str, types.ModuleType]:
    sockets.SOCKET.__dict__["if_nameindex"] = _no_interfaces

    def module(name: str, **names: Any) -> types.ModuleType:
        made = types.ModuleType(name)
        made.__dict__.update(names)
        return made

    connection = module("connection", Connection=sockets.Connection)
    reduction = module("reduction", send_handle=sockets.send_handle, recv_handle=sockets.recv_handle)
    return {
        **MODULES,
        "os": _changed("os", memfd_create=sockets.memfd_create),
        "sys": _Sys("sys"),
        "threading": _changed("threading", main_thread=_main_thread),
        "traceback": _changed("traceback", extract_tb=traceback.extract_tb, format_exception=_format_exception),
        "select": _changed("select", poll=sockets.Poll, POLLHUP=select.POLLHUP, POLLRDHUP=select.POLLHUP),
        "pathlib": module("pathlib", Path=Path),
        "mmap": sockets.MMAP,
        "socket": sockets.SOCKET,
        "gc": module("gc", collect=lambda: 0, freeze=lambda: None, unfreeze=lambda: None),
        "faulthandler": module(
            "faulthandler", is_enabled=lambda: True, dump_traceback=lambda file: file.write("a stack\n")
        ),
        "concurrent": module("concurrent", futures=FUTURES),
        "concurrent.futures": module("futures", Future=FUTURES.Future, wait=FUTURES.wait, ThreadPoolExecutor=Pool),
        "multiprocessing": module("multiprocessing", connection=connection, reduction=reduction),
        "multiprocessing.connection": connection,
        "multiprocessing.reduction": reduction,
    }


def _format_exception(error: BaseException) -> list[str]:
    return [f"{type(error).__name__}: {error}\n"]


__all__ = ["OS", "FUTURES", "Log", "OwnCount", "OwnList", "Pool", "end_pools", "errno", "make_modules", "sys", "Inode"]
