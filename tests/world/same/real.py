"""The real Linux: a process that runs what it is asked for, each case in a copy of itself and in a folder of its own.

Its own, because a copy of a process with threads is no process to start others in.
"""

from __future__ import annotations

import ast
import ctypes
import fcntl
import glob
import io
import os
import queue
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from tests.world.same import children, files, names, pipes, processes, waiting
from tests.world.same.cases import Libraries, run_case
from tests.world.same.sequences import run_sequence

REPO = Path(__file__).resolve().parents[3]
PROGRAMS = children.__file__ or ""
PR_SET_CHILD_SUBREAPER = 36
MOST_S = 60
MEMORY = Path("/dev/shm")
PARTS = files, names, pipes, processes, waiting


def libraries() -> Libraries:
    modules = (os, time, signal, fcntl, threading, subprocess, queue, select, shutil, glob, ctypes, io, sys)
    return Libraries(
        **{module.__name__: module for module in modules},
        open=open,
        here=str(Path.cwd()),
        fork=children.fork,
        child=lambda *words: [sys.executable, "-I", "-S", PROGRAMS, *words],
    )


def _make_folder() -> Path:
    """In memory where that is possible; what is above it is a case's own too."""
    above = Path(mkdtemp(prefix="same-", dir=MEMORY if MEMORY.is_dir() else None)).resolve()
    folder = above / "case"
    folder.mkdir(0o755)
    above.chmod(0o755)
    return folder


def _run_in_copy(name: str) -> Any:
    """A case's answer; what it leaves of processes is killed."""
    folder = _make_folder()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.chdir(folder)
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1):
            os.dup2(null, fd)
        os.close(null)
        os.close(reading)
        writing = fcntl.fcntl(writing, fcntl.F_DUPFD_CLOEXEC, 200)  # the low ones are the case's
        os.closerange(3, 200)
        signal.alarm(MOST_S)
        answer = repr(run_case(libraries(), name))
        with os.fdopen(writing, "w") as pipe:
            pipe.write(answer)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        answer = pipe.read()
    os.waitpid(pid, 0)
    while below := Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        for word in below:
            os.kill(int(word), signal.SIGKILL)
            os.waitpid(int(word), 0)
    shutil.rmtree(folder.parent)
    return ast.literal_eval(answer) if answer else "the case was killed"


def _run_sequences(sequences: list[Any]) -> list[Any]:
    answers = []
    before = Path.cwd()
    for steps in sequences:
        folder = _make_folder()
        os.chdir(folder)
        answers.append(run_sequence(libraries(), steps))
        os.chdir(before)
        shutil.rmtree(folder.parent)
    return answers


class RealLinux:
    """The process, as a test has it."""

    def __init__(self) -> None:
        pipe = subprocess.PIPE
        command = [sys.executable, "-m", "tests.world.same.real"]
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=REPO)

    def ask(self, what: str, about: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{(what, about)!r}\n")
        self._process.stdin.flush()
        return ast.literal_eval(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate(timeout=30)


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):  # whoever started the tests may hear none of them
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for line in sys.stdin:
        what, about = ast.literal_eval(line)
        answer = _run_in_copy(about) if what == "case" else _run_sequences(about)
        print(repr(answer), flush=True)


if __name__ == "__main__":
    main()
