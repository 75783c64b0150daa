"""Other accounts of this machine: what they do and see. They need none of the system's entries, a number is enough."""

from __future__ import annotations

import codecs
import grp  # noqa: F401  # see below
import os
import pwd  # noqa: F401  # see below
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

codecs.lookup("ascii")
"""Another account cannot load modules of a Python below root's home, so what it needs is loaded here."""

ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
VICTIM, MALLORY = 54321, 54322
"""User ids; neither needs an account."""
Tell = Callable[..., None]
"""Calls what it is given, and tells the test what that returned or raised."""


@contextmanager
def public_folder(mode: int) -> Iterator[Path]:
    """A folder outside pytest's own, which is closed to others."""
    folder = Path(mkdtemp(prefix="tf-public-", dir="/tmp"))
    folder.chmod(mode)
    try:
        yield folder
    finally:
        subprocess.run(["rm", "-rf", str(folder)], check=True)


def as_account(uid: int, act: Callable[..., Any], *args: Any, home: Path | str = "/nonexistent") -> Any:
    """What `act(*args)` returns or raises in a process of that account. Both are pickled on their way."""
    return begin_as(uid, act, *args, home=home)()


def begin_as(uid: int, act: Callable[..., Any], *args: Any, home: Path | str = "/nonexistent") -> Callable[[], Any]:
    """The same, begun; what this returns waits for it."""
    pid, here = _fork_as(uid, lambda tell: tell(act, *args), home=home)

    def wait() -> Any:
        try:
            return _told(here)
        finally:
            os.waitpid(pid, 0)

    return wait


@contextmanager
def staying(uid: int, begin: Callable[[], Any], then: Callable[[], object] = signal.pause) -> Iterator[Any]:
    """What `begin` returns in a process of that account, which then stays and does `then` over and over until the
    block ends."""

    def stay(tell: Tell) -> None:
        tell(begin)
        while True:
            then()

    pid, here = _fork_as(uid, stay)
    try:
        yield _told(here)
        assert os.waitpid(pid, os.WNOHANG)[0] == 0, "it has ended"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _fork_as(uid: int, live: Callable[[Tell], None], *, home: Path | str = "/nonexistent") -> tuple[int, Connection]:
    """A process of that account: its id, and where it tells what an act returned or raised."""
    here, there = get_context("fork").Pipe(duplex=False)

    def tell(act: Callable[..., Any], *args: Any) -> None:
        try:
            there.send((True, act(*args)))
        except Exception as error:
            there.send((False, error))

    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            os.umask(0o022)
            os.environ["HOME"] = str(home)
            live(tell)
        finally:
            os._exit(0)
    there.close()
    return pid, here


def _told(here: Connection) -> Any:
    with here:
        went_well, result = here.recv()
    if went_well:
        return result
    raise result
