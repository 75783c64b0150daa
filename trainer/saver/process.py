"""The trainer's side of its saver process: starts it, sends orders, answers at stages, and finds out how it ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Any

import trainer
from trainer.checkpoint.states import State
from trainer.checkpoint.write import Order, StageHook, ignore_stage
from trainer.run_folder import held_descriptors
from trainer.saver.messages import Outcome, Ready, Save, Setup, StageReached, receive, send
from trainer.saver.region import Region

NOT_FOR_A_SAVER = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
"""Signals that a terminal or a scheduler sends to the whole process group; the trainer decides whether a save ends."""


@dataclass(frozen=True)
class Launched:
    connection: Connection
    pid: int
    end: Callable[[], str]
    """Kills the process if it is still running, and returns how it ended: `was ended by signal 9 (SIGKILL)`."""


Launch = Callable[[], Launched]


def launch_saver() -> Launched:
    """Start this rank's saver. Call this in the main thread, because the saver ends with the thread that started it.

    Raises OSError if it cannot be started.
    """
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "trainer.saver.main", str(theirs.fileno()), str(os.getpid())]
    with theirs:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, NOT_FOR_A_SAVER)  # the child inherits the mask
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                env=saver_environment(),
                # the run folder's locks, so that no later start begins while this process still writes
                pass_fds=(theirs.fileno(), *held_descriptors()),
            )
        except OSError:
            ours.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return Launched(Connection(ours.detach()), process.pid, lambda: _ended(process))


def saver_environment() -> dict[str, str]:
    """The saver's environment: no GPU, one thread, and this process's module search path."""
    paths = [str(Path(trainer.__file__).parents[1]), *(path for path in sys.path if path)]
    own = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
    return {**os.environ, **own, "PYTHONPATH": os.pathsep.join(paths)}


def _ended(process: subprocess.Popen[bytes]) -> str:
    with suppress(subprocess.TimeoutExpired):  # the connection closes shortly before the process ends
        process.wait(0.2)
    process.kill()
    code = process.wait()
    if code >= 0:
        return f"ended with code {code}"
    with suppress(ValueError):
        hint = ", mostly the system's out-of-memory killer" if code == -signal.SIGKILL else ""
        return f"was ended by signal {-code} ({signal.Signals(-code).name}{hint})"
    return f"was ended by signal {-code}"


class SaverProcess:
    """The connection to a saver process. Only one thread may use it at a time."""

    def __init__(self, launched: Launched, setup: Setup) -> None:
        """Raises OSError if the process has already ended."""
        self._connection = launched.connection
        self._end = launched.end
        self._region: Region | None = None
        send(self._connection, setup)

    def wait_until_up(self) -> str:
        """Wait until all savers have joined. Returns how this one was lost; empty if it was not."""
        answer = self._answer()
        return "" if isinstance(answer, Ready) else self._lost(answer)

    def is_gone(self) -> bool:
        """Whether the process has ended. Call this only while no answer is expected from it."""
        return self._connection.closed or self._connection.poll()

    def save(self, order: Order, state: State, region: Region, on_stage: StageHook) -> Outcome:
        """Have the saver write a state that is in the region. `on_stage` is called at each stage; the saver waits for
        its return."""
        new = region is not self._region
        try:
            send(self._connection, Save(order, state, region.size if new else None, on_stage is not ignore_stage))
            if new:
                send_handle(self._connection, region.descriptor, None)
                self._region = region
        except OSError:
            return Outcome(lost=self._lost(None))
        while isinstance(answer := self._answer(), StageReached):
            on_stage(answer.name)
            with suppress(OSError):  # the next answer shows it
                send(self._connection, None)
        return answer if isinstance(answer, Outcome) and not answer.lost else Outcome(lost=self._lost(answer))

    def kill(self) -> str:
        """Kill the process, from any thread; a thread that waits for its answer then sees that it is lost. Returns how
        it ended."""
        return self._end()

    def end(self) -> str:
        """Kills the process. Returns how it ended."""
        said = self._end()
        self._region = None
        self._connection.close()
        return said

    def _answer(self) -> Any:
        try:
            return receive(self._connection)
        except (EOFError, OSError):
            return None

    def _lost(self, answer: Any) -> str:
        said = self.end()
        return answer.lost if isinstance(answer, Outcome) and answer.lost else said
