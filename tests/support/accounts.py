"""Other accounts of this machine: what they do and see. They need none of the system's entries, a number is enough."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")


def as_account(uid: int, ask: Callable[[], Any]) -> Any:
    """What `ask` returns in a process of that account, or the text of what it raises."""
    return begin_as(uid, ask)()


def begin_as(uid: int, ask: Callable[[], Any]) -> Callable[[], Any]:
    """The same, begun; what this returns waits for it."""
    reading, writing = os.pipe()
    pid = _fork_as(uid, lambda: os.write(writing, json.dumps(_told(ask)).encode()))
    os.close(writing)

    def wait() -> Any:
        with os.fdopen(reading, "rb") as answer:
            text = answer.read()
        os.waitpid(pid, 0)
        return json.loads(text)

    return wait


@contextmanager
def meanwhile(uid: int, act: Callable[[], object]) -> Iterator[int]:
    """A process (its pid) of that account that does it over and over, once it has done it the first time."""
    reading, writing = os.pipe()

    def go_on() -> None:
        act()
        os.close(writing)
        while True:
            act()

    pid = _fork_as(uid, go_on)
    os.close(writing)
    try:
        assert os.read(reading, 1) == b""
        os.close(reading)
        assert os.waitpid(pid, os.WNOHANG)[0] == 0, "it has ended"
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _fork_as(uid: int, act: Callable[[], object]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            act()
        finally:
            os._exit(0)
    return pid


def _told(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
