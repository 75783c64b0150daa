"""Run pytest so that it ends, and leaves nothing behind: `python -m tests.run [OPTIONS] PYTEST'S WORDS`.

pytest-timeout ends a test that waits too long in Python. This process stands outside, for what that cannot see: a
worker that died while its children hold its pipes, one that was stopped, one that hangs in C, pytest itself, all tests
together. It says which tests ran then, lets pytest tell its failures, and ends every process of the run: it is the
subreaper of them all, supervisors of jobs and daemons of servers included. It needs Linux.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from tests.support.limits import PATIENCE, PATIENCE_NAME, SUITE_S
from tests.support.notes import FOLDER_NAME, read_note

LOOK_EVERY_S = 1.0
STOPPED_S = 20.0 * PATIENCE
"""A worker that was stopped for so long does not go on."""
LATE_S = 120.0 * PATIENCE
"""What a test has beyond its own limit, at which pytest-timeout ends it, and its worker for telling its stacks."""
GOODBYE_S = 30.0 * PATIENCE
"""What pytest has for telling its failures and ending its workers (whom it gives 10 s)."""
CUT_SHORT = 124
"""The exit code of a run that was ended from here; of coreutils' `timeout`."""
BUSY = "while kill -0 $PPID 2>/dev/null; do :; done"
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Process:
    """A process as /proc has it now."""

    pid: int
    parent: int
    state: str
    command: str


def process_of(pid: int) -> Process | None:
    """None where it has ended."""
    try:
        before, _, after = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return None
    state, parent = after.split()[:2]
    return Process(pid, int(parent), state, words or before.partition("(")[2])


def processes() -> dict[int, Process]:
    """All of this machine."""
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return {pid: process for pid in pids if (process := process_of(pid))}


def below(pid: int, known: dict[int, Process]) -> Iterator[Process]:
    """The processes that descend from one, it not included."""
    for process in known.values():
        if process.parent == pid:
            yield process
            yield from below(process.pid, known)


@dataclass
class Watch:
    """What is known of the workers, from their notes and /proc."""

    notes: Path
    say: Callable[[str], None]
    stopped_since: dict[int, float] = field(default_factory=dict)
    told_off: dict[int, float] = field(default_factory=dict)
    """Workers that were asked for their stacks."""
    died_at: dict[str, float] = field(default_factory=dict)

    def read(self) -> list[dict[str, Any]]:
        return [told for path in sorted(self.notes.glob("*.json")) if (told := read_note(path))]

    def look(self) -> str | None:
        """Ends workers that hang; the reason to end the whole run, if there is one that pytest has not seen."""
        now = time.monotonic()
        for told in self.read():
            pid, worker, words = told["pid"], told["worker"], f"{told['worker']} (pid {told['pid']})"
            process = process_of(pid)
            state = process.state if process else "Z"
            if state == "Z":
                if now - self.died_at.setdefault(worker, now) > GOODBYE_S:
                    return f"{words} died while it ran {told['test']}, and pytest goes on waiting"
            elif state == "T":
                if now - self.stopped_since.setdefault(pid, now) > STOPPED_S:
                    self.say(f"{words} was stopped for {STOPPED_S:g} s while it ran {told['test']}: ending it")
                    os.kill(pid, signal.SIGKILL)
            else:
                self.stopped_since.pop(pid, None)
                if now - told["since"] > told["limit_s"] + LATE_S:
                    self._end_hanging(pid, f"{words} runs {told['test']} for {now - told['since']:.0f} s", now)
        return None

    def _end_hanging(self, pid: int, words: str, now: float) -> None:
        if pid not in self.told_off:
            self.say(f"{words}, more than it may and than pytest-timeout can end: ending it, its stacks come first")
            self.told_off[pid] = now
            os.kill(pid, signal.SIGABRT)  # pytest's faulthandler tells the stacks, from C
        elif now - self.told_off[pid] > STOPPED_S:
            os.kill(pid, signal.SIGKILL)


class Run:
    """One run of pytest as this process's child."""

    def __init__(self, words: list[str], *, within_s: float, beside: int, notes: Path) -> None:
        self.within_s, self.watch, self.began = within_s, Watch(notes, self.say), time.monotonic()
        self.asked: int | None = None
        self.code: int | None = None
        env = {**os.environ, FOLDER_NAME: str(notes), PATIENCE_NAME: f"{PATIENCE:g}"}
        self.busy = [os.posix_spawn("/bin/sh", ["sh", "-c", BUSY], env) for _ in range(beside)]
        command = [sys.executable, "-m", "pytest", *words]
        self.pid = os.posix_spawn(sys.executable, command, env, setsigdef=[signal.SIGINT])

    def say(self, text: str) -> None:
        print(f"\ntests.run: {text}", file=sys.stderr, flush=True)

    def ask(self, number: int, frame: FrameType | None = None) -> None:
        """A signal came: end the run."""
        self.asked = number

    def to_the_end(self) -> int:
        """Waits for pytest, ends it where it must be ended, and all else that the run has left; the exit code."""
        why = self._wait(self._reason_to_end)
        if why is not None:
            self.say(why)
            for told in self.watch.read():
                self.say(f"{told['worker']}: {told['test']}, for {time.monotonic() - told['since']:.0f} s")
            os.kill(self.pid, signal.SIGINT)
            ended_by = time.monotonic() + GOODBYE_S
            self._wait(lambda: "" if time.monotonic() > ended_by else None)
        elif any(told["pid"] == self.pid for told in self.watch.read()):
            self.say(f"pytest ended with {self.code} while it ran {self.watch.read()[0]['test']}")
            self.code = self.code or 1
        left = self._sweep()
        if left:
            self.say(f"these do not end: {left}")
        if why is not None or left or self.code is None:
            return CUT_SHORT if self.asked is None else 128 + self.asked
        return self.code

    def _reason_to_end(self) -> str | None:
        if self.asked is not None:
            return f"ended by {signal.Signals(self.asked).name}; running:"
        if time.monotonic() - self.began > self.within_s:
            return f"the tests did not end within {self.within_s:g} s (--within); running:"
        return self.watch.look()

    def _wait(self, reason: Callable[[], str | None]) -> str | None:
        """Until pytest ends (None) or there is a reason to wait no longer."""
        looks_at = 0.0
        while True:
            self._reap()
            if self.code is not None:
                return None
            if time.monotonic() >= looks_at:
                why = reason()
                if why is not None:
                    return why
                looks_at = time.monotonic() + LOOK_EVERY_S
            signal.sigtimedwait([signal.SIGCHLD], LOOK_EVERY_S)  # as soon as init would, we reap

    def _reap(self) -> bool:
        """Takes leave of children that have ended, orphans of the run among them; whether there are any others."""
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self.pid:
                    self.code = os.waitstatus_to_exitcode(ended[1])
                    self.code = self.code if self.code >= 0 else 128 - self.code
            return True
        except ChildProcessError:
            return False

    def _sweep(self) -> list[str]:
        """Kill what is left of the run; the commands of what cannot be killed."""
        ended_by, told = time.monotonic() + GOODBYE_S, False
        while self._reap() and time.monotonic() < ended_by:
            left = list(below(os.getpid(), processes()))
            commands = [p.command[:120] for p in left if p.state != "Z" and p.pid not in (self.pid, *self.busy)]
            if commands and not told:
                self.say(f"{len(commands)} processes of the tests were left and are ended now:")
                print(*commands, sep="\n", file=sys.stderr, flush=True)
            told = True
            for process in left:
                try:
                    os.kill(process.pid, signal.SIGKILL)
                except (ProcessLookupError, PermissionError):
                    pass
            time.sleep(0.1)
        return [process.command for process in below(os.getpid(), processes())]


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.run", allow_abbrev=False)
    parser.add_argument("--within", type=float, default=SUITE_S, metavar="S", help=f"of all tests; {SUITE_S:g}")
    parser.add_argument("--beside", type=int, default=0, metavar="N", help="busy processes that run beside the tests")
    options, rest = parser.parse_known_args(words)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with tempfile.TemporaryDirectory(prefix="torchferry-notes-") as notes:
        run = Run(rest, within_s=options.within, beside=options.beside, notes=Path(notes))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, run.ask)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        return run.to_the_end()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
