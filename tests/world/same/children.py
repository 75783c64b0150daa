"""The programs that cases start. In the real Linux this file is a program of its own: `children.py NAME WORD...`."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

CHILDREN: dict[str, Callable[[Any, list[str]], None]] = {}
ALL = set(range(1, 32)) - {signal.SIGKILL, signal.SIGSTOP}


def child(function: Callable[[Any, list[str]], None]) -> Callable[[Any, list[str]], None]:
    CHILDREN[function.__name__] = function
    return function


def say(m: Any, text: str) -> None:
    m.os.write(1, text.encode() + b"\n")


@child
def echo(m: Any, words: list[str]) -> None:
    """Its input to its output, and its words to its error output."""
    while data := m.os.read(0, 4096):
        m.os.write(1, data)
    m.os.write(2, " ".join(words).encode())


@child
def leave(m: Any, words: list[str]) -> None:
    raise SystemExit(int(words[0]) if words[0].isdigit() else words[0])


@child
def fail(m: Any, words: list[str]) -> None:
    """As who never ends well: by a signal."""
    m.os.kill(m.os.getpid(), int(words[0]))


@child
def wait(m: Any, words: list[str]) -> None:
    """Says that it is there, and stays."""
    say(m, "here")
    m.time.sleep(30)


@child
def tell(m: Any, words: list[str]) -> None:
    """What it has been given."""
    sets = m.signal.pthread_sigmask(signal.SIG_BLOCK, [])
    say(m, " ".join(words))
    say(m, str(sorted(map(int, sets))))
    ignored = [n for n in (signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM) if m.signal.getsignal(n) == signal.SIG_IGN]
    say(m, str([int(n) for n in ignored]))
    say(m, str((m.os.getpid() == m.os.getpgrp(), m.os.environ.get("GIVEN"), m.os.path.basename(m.os.getcwd()))))


@child
def holds(m: Any, words: list[str]) -> None:
    """Which of these descriptors it has."""
    for word in words:
        try:
            m.os.fstat(int(word))
            say(m, f"{word} is open")
        except OSError as refused:
            say(m, f"{word} {refused}")


@child
def puts(m: Any, words: list[str]) -> None:
    """Writes to a descriptor until it is killed or refused."""
    while True:
        try:
            m.os.write(int(words[0]), b"x" * 4096)
        except OSError as refused:
            m.os.write(2, str(refused).encode())
            return


@child
def handles(m: Any, words: list[str]) -> None:
    """Says each signal that it hears, and ends with the third."""
    heard: list[int] = []

    def hear(number: int, frame: Any) -> None:
        heard.append(int(number))
        say(m, f"hears {int(number)}")

    for word in words:
        m.signal.signal(int(word), hear)
    say(m, "here")
    while len(heard) < 3:
        m.time.sleep(0.01)


@child
def ignores(m: Any, words: list[str]) -> None:
    m.signal.signal(int(words[0]), signal.SIG_IGN)
    say(m, "here")
    m.time.sleep(30)


@child
def orphans(m: Any, words: list[str]) -> None:
    """Leaves a child behind, which says whose it is then."""

    def stay() -> None:
        while m.os.getppid() == me:
            m.time.sleep(0.005)
        say(m, f"{m.os.getppid()}")

    me = m.os.getpid()
    pid = m.fork(stay)
    say(m, f"{me} {pid}")


@child
def mourns(m: Any, words: list[str]) -> None:
    """Its child dies with it."""

    def stay() -> None:
        m.ctypes.CDLL(None).prctl(1, int(words[0]), 0, 0, 0)
        say(m, "here")
        m.time.sleep(30)

    m.fork(stay)
    m.time.sleep(30)


@child
def becomes(m: Any, words: list[str]) -> None:
    m.os.execvp(words[0], words)


def fork(body: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            body()
            code = 0
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else 0 if left.code is None else 1
        finally:
            os._exit(code)
    return pid


if __name__ == "__main__":
    import ctypes

    library = SimpleNamespace(os=os, signal=signal, time=time, ctypes=ctypes, fork=fork)
    CHILDREN[sys.argv[1]](library, sys.argv[2:])
