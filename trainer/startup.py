"""Measures the time from the start to the end of the first step, by phase; reported once. Imports no torch.

All times are seconds since the machine started, so that times of the launcher and of a rank can be compared.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trainer.schema import STARTED_ENV

Phase = Literal[
    "launcher", "command", "imports", "ranks", "data", "model", "weights", "probe", "evaluation", "first step"
]

WORDS: dict[Phase, str] = {
    "launcher": "launcher",  # train.py before it becomes torchrun, and torchrun until the rank's own Python starts
    "command": "command",  # Python itself, the config, the check of the GPUs
    "imports": "imports",  # torch, the trainer's modules
    "ranks": "ranks",  # the device, the process groups
    "data": "tokenizer and data",
    "model": "model",  # building and wrapping it, its optimizer
    "weights": "weights",  # reading or creating them, or reading a checkpoint
    "probe": "probe",  # a pass over the largest batch, including compilation
    "evaluation": "evaluation",
    "first step": "first step",  # including compilation
}
UNTOLD_S = 0.05
"""Phases shorter than this are left out of the report."""
LONG_S = 5.0
"""After so many seconds a running phase is reported; again whenever its duration has tripled."""


@dataclass(frozen=True)
class StartReport:
    """Seconds until the end of the first step, by phase, in order."""

    seconds: dict[Phase, float]

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    def render(self) -> str:
        """`first step after 14.2 s: 2.9 imports, 0.4 ranks, 1.1 tokenizer and data, 6.8 first step`."""
        parts = [f"{spent:.1f} {WORDS[phase]}" for phase, spent in self.seconds.items() if spent >= UNTOLD_S]
        return f"first step after {self.total_s:.1f} s: {', '.join(parts)}"

    def to_dict(self) -> dict[str, float]:
        """The values for outcome.json."""
        return {phase: round(spent, 2) for phase, spent in self.seconds.items()}


class Startup:
    """Records when each phase begins, until `finish`. Without `began_s` (e.g. in tests) it records nothing."""

    def __init__(
        self, began_s: float | None = None, *, launched_s: float | None = None, clock: Callable[[], float] | None = None
    ) -> None:
        """`began_s`: when this process started; `launched_s`: when its launcher started, if known."""
        self._clock = clock or now_s
        self._marks: list[tuple[Phase, float]] = []
        self._running = began_s is not None
        self._ended = threading.Event()
        self.report: StartReport | None = None
        if began_s is not None:
            self._marks = [] if launched_s is None or launched_s > began_s else [("launcher", launched_s)]
            self._marks.append(("command", began_s))

    @classmethod
    def of_process(cls, environ: MutableMapping[str, str]) -> Startup:
        """With the start times of this process and of its launcher. Removes the launcher's variable from `environ`: it
        is not valid for child processes of this one."""
        now = now_s()
        return cls(process_start_s(now), launched_s=_seconds(environ.pop(STARTED_ENV, ""), now))

    def enter(self, phase: Phase) -> None:
        """Begin this phase, and end the previous one. A phase may occur several times."""
        if self._running:
            self._marks.append((phase, self._clock()))

    def watch(self, tell: Callable[[str], None], *, every_s: float = 0.5) -> None:
        """Reports long phases from a background thread while they last, so the log shows what the run waits for."""
        if self._running:
            threading.Thread(target=self._watch, args=(tell, every_s), name="startup", daemon=True).start()

    def _watch(self, tell: Callable[[str], None], every_s: float) -> None:
        seen, due_s = 0, LONG_S
        while not self._ended.wait(every_s):
            if len(self._marks) != seen:
                seen, due_s = len(self._marks), LONG_S
            phase, began_s = self._marks[seen - 1]
            spent_s = self._clock() - began_s
            if spent_s >= due_s:
                with suppress(OSError, ValueError):  # the reader of the output is gone
                    tell(f"starting, {spent_s:.0f} s: {WORDS[phase]}")
                due_s = 3 * max(due_s, spent_s)

    def end_watch(self) -> None:
        """Stop the reports of `watch`: the first step is done, or there will be none."""
        self._ended.set()

    def finish(self) -> StartReport | None:
        """The report at the end of the first step; None after later steps, and if nothing was recorded."""
        if not self._running:
            return None
        self._running = False
        self.end_watch()
        self.report = summarize(self._marks, ended_s=self._clock())
        return self.report


def summarize(marks: list[tuple[Phase, float]], *, ended_s: float) -> StartReport:
    """The seconds of each phase. `marks`: (phase, its start time), in order of time."""
    seconds: dict[Phase, float] = {}
    ends = [began for _, began in marks[1:]] + [ended_s]
    for (phase, began), ended in zip(marks, ends, strict=True):
        seconds[phase] = seconds.get(phase, 0.0) + max(0.0, ended - began)
    return StartReport(seconds)


def now_s() -> float:
    clock = getattr(time, "CLOCK_BOOTTIME", None)  # Linux
    return time.monotonic() if clock is None else time.clock_gettime(clock)


def process_start_s(now: float, *, stat: Path = Path("/proc/self/stat")) -> float:
    """When this process started, to 0.01 s; `now` if the system gives no time or an impossible one."""
    try:
        ticks = int(stat.read_text().rpartition(")")[2].split()[19])
        began = ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return now
    return began if 0 < began <= now < began + LONGEST_S else now


LONGEST_S = 3600.0
"""Start times older than this are not believed, because a process would have trained by then: in a sandbox the clocks
may disagree."""


def _seconds(text: str, now: float) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if now - LONGEST_S < value <= now else None
