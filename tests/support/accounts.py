"""Other accounts of this machine: what a test does as one of them. Becoming somebody else needs root."""

from __future__ import annotations

import grp  # noqa: F401  # another user may not be able to read where it lies
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
VICTIM, MALLORY = 54321, 54322
"""User ids; neither needs an account."""


def _become(uid: int, home: str, answer: Any, act: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
    os.environ["HOME"] = home
    os.umask(0o022)
    try:
        answer.send((True, act(*args)))
    except BaseException as error:  # what it was is the caller's to see
        answer.send((False, error))


def as_user(uid: int, act: Callable[..., Any], *args: Any, home: Path | str = "/nonexistent") -> Any:
    """What `act(*args)` returns or raises in a process of that user."""
    here, there = get_context("fork").Pipe(duplex=False)
    process = get_context("fork").Process(target=_become, args=(uid, str(home), there, act, args))
    process.start()
    there.close()
    went_well, result = here.recv()
    process.join()
    if went_well:
        return result
    raise result


@contextmanager
def public_folder(mode: int) -> Iterator[Path]:
    """A folder outside pytest's own, which is closed to others."""
    folder = Path(mkdtemp(prefix="tf-public-", dir="/tmp"))
    folder.chmod(mode)
    try:
        yield folder
    finally:
        subprocess.run(["rm", "-rf", str(folder)], check=True)
