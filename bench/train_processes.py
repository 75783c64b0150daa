"""Ends all processes of a measured run, in any session.

torchrun gives each rank a separate session, so killing the process group leaves the ranks running. They would train on
during the next row, on the same GPUs, until they notice. All descendants of a run carry its mark.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import uuid
from pathlib import Path
from typing import NoReturn

MARK_ENV = "TORCHFERRY_BENCH_MARK"


def leave(number: int, _: object) -> NoReturn:
    """Handles SIGTERM: ends the current measurement on exit, as after Ctrl-C."""
    sys.exit(128 + number)


def new_mark() -> str:
    """A value of MARK_ENV that no other run has."""
    return uuid.uuid4().hex


def end_marked(mark: str, *, within_s: float = 30.0) -> None:
    """Kill every process with this mark, and return when none is left: its GPU memory is then free.

    Raises RuntimeError if some still run after `within_s`: beside them every figure would be useless.
    """
    deadline = time.monotonic() + within_s
    while alive := marked(mark):
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes {alive} do not end")
        for pid in alive:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.05)


def marked(mark: str) -> list[int]:
    """The living processes with this mark."""
    word = f"{MARK_ENV}={mark}".encode()
    return [int(folder.name) for folder in Path("/proc").glob("[0-9]*") if word in _environ(folder)]


def _environ(process: Path) -> list[bytes]:
    try:
        return (process / "environ").read_bytes().split(b"\0")  # empty for a zombie
    except OSError:
        return []
