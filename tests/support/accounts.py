"""Other accounts of this machine: what they do and see. They need none of the system's entries, a number is enough."""

from __future__ import annotations

import codecs
import grp  # noqa: F401  # see below
import json
import os
import pwd  # noqa: F401  # see below
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

codecs.lookup("ascii")
"""Another account cannot load modules of a Python below root's home, so what it needs is loaded here."""

ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
VICTIM, MALLORY = 54321, 54322
"""User ids; neither needs an account."""


@contextmanager
def public_folder(mode: int) -> Iterator[Path]:
    """A folder outside pytest's own, which is closed to others."""
    folder = Path(mkdtemp(prefix="tf-public-", dir="/tmp"))
    folder.chmod(mode)
    try:
        yield folder
    finally:
        subprocess.run(["rm", "-rf", str(folder)], check=True)


def as_user(uid: int, act: Callable[..., Any], *args: Any, home: Path | str = "/nonexistent") -> Any:
    """What `act(*args)` returns or raises in a process of that account, as it is."""
    here, there = get_context("fork").Pipe(duplex=False)

    def answer() -> None:
        os.environ["HOME"] = str(home)
        os.umask(0o022)
        try:
            there.send((True, act(*args)))
        except Exception as error:
            there.send((False, error))

    pid = _fork_as(uid, answer)
    there.close()
    went_well, result = here.recv()
    os.waitpid(pid, 0)
    if went_well:
        return result
    raise result


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
def staying(uid: int, begin: Callable[[], Any], then: Callable[[], object] = signal.pause) -> Iterator[Any]:
    """What `begin` returns in a process of that account, which then stays and does `then` over and over until the
    block ends."""
    reading, writing = os.pipe()

    def stay() -> None:
        os.write(writing, json.dumps(_told(begin)).encode())
        os.close(writing)
        while True:
            then()

    pid = _fork_as(uid, stay)
    os.close(writing)
    try:
        with os.fdopen(reading, "rb") as answer:
            yield json.loads(answer.read())
        assert os.waitpid(pid, os.WNOHANG)[0] == 0, "it has ended"
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
