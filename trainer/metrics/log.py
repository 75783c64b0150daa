"""Output of a run's numbers: one JSON object per line, a readable console line, a progress bar on a terminal."""

from __future__ import annotations

import errno
import json
import math
import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TextIO

from trainer.console import printable
from trainer.files import replace_bytes
from trainer.metrics.trackers import Tracker, numbers_of
from trainer.typed import InvalidData, Within, from_json, parse_json

Record = dict[str, Any]


class MetricsLog:
    """The only output of the run's numbers; a rank other than 0 gets `enabled=False` and writes nothing.

    Lines are appended to `path` and flushed one by one. `keep_through` is the step from which a resumed run continues:
    later records of the earlier start are dropped, so no step appears twice. If the disk is full, records are missing,
    and the run continues.
    """

    def __init__(self, path: Path, *, total_steps: int, keep_through: int = 0, enabled: bool = True) -> None:
        self.total_steps = total_steps
        self.trackers: list[Tracker] = []
        """Trackers that also get the numbers."""
        self._warned = False
        self._screen = Screen(sys.stdout) if enabled else None
        self._file: TextIO | None = None
        self._began = (time.monotonic(), keep_through)
        if enabled:
            drop_records_after(path, keep_through or -1)  # a run that starts over evaluates at step 0 again
            self._file = path.open("a", encoding="utf-8")

    def train(self, record: Record) -> None:
        """One training step: `step, steps, loss, grad_norm, lr, tokens, …`."""
        if self._write(record) and self._screen:
            self._screen.line(render_train(record, self.total_steps, self._seconds_left(record["step"])))
            self._screen.bar(record["step"], self.total_steps)

    def evaluation(self, record: Record) -> None:
        """One evaluation: `step, eval_loss, eval_tokens`."""
        if self._write(record) and self._screen:
            self._screen.line(render_eval(record, self.total_steps))

    def note(self, text: str) -> None:
        """A text for the console only."""
        if self._screen:
            self._screen.line(text)

    def close(self) -> None:
        if self._screen:
            self._screen.clear()
        for tracker in self.trackers:
            tracker.close()
        if self._file:
            with suppress(OSError):  # the rest of its buffer does not fit on the disk
                self._file.close()
            self._file = None

    def _write(self, record: Record) -> bool:
        if self._file is None:
            return False
        try:
            self._file.write(json.dumps(finite(record)) + "\n")
            self._file.flush()  # data that does not fit stays in the buffer, and is written once there is space again
        except OSError as error:
            self._warn(f"warning: {self._file.name} was not written: {error}; training goes on")
        for tracker in self.trackers:
            tracker.log(record["step"], numbers_of(record))
        return True

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            self.note(text)

    def _seconds_left(self, step: int) -> float | None:
        began, first = self._began
        done = step - first
        # the first step includes warm-up costs, which would distort the estimate
        return (time.monotonic() - began) / done * (self.total_steps - step) if done > 1 else None


FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Screen:
    """Lines on a stream, and below them a progress bar if the stream is a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._live = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._shown = ""

    def line(self, text: str) -> None:
        shown = self._shown
        self.clear()
        self._put(printable(text) + "\n")
        self._show(shown)

    def bar(self, step: int, total: int) -> None:
        if self._live:
            self.clear()
            self._show(render_bar(step, total))

    def clear(self) -> None:
        if self._shown:
            self._put("\r\x1b[K")
            self._shown = ""

    def _show(self, text: str) -> None:
        self._put(text)
        self._shown = text

    def _put(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError as error:  # on a full disk lines are missing, and the run continues
            if error.errno not in FULL_DISK:
                raise


def drop_records_after(path: Path, step: int) -> None:
    """Keep only complete records up to `step` in the file; atomic, and no error if there is no file."""
    if not path.exists():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if _recorded_step(line) <= step]
    if kept == lines:
        return
    replace_bytes(path, b"".join(kept))


@dataclass(frozen=True)
class Stepped:
    """The part of a record that is read again."""

    step: Annotated[float, Within(0)]


def _recorded_step(line: bytes) -> float:
    """The step of one JSON line; infinite for a line that a killed process left unfinished, or that is not a record."""
    try:
        return from_json(parse_json(line), Stepped).step if line.endswith(b"\n") else math.inf
    except InvalidData:
        return math.inf


def finite(record: Record) -> Record:
    """The record with None in place of NaN and infinities, which JSON does not have."""
    return {key: None if _is_nonfinite(value) else value for key, value in record.items()}


def _is_nonfinite(value: object) -> bool:
    return isinstance(value, float) and (value != value or value in (float("inf"), float("-inf")))


def render_train(record: Record, total_steps: int, seconds_left: float | None) -> str:
    """`step 12/200  loss 3.1234  lr 9.80e-04  grad 1.23  12.3k tok/s/gpu  mem 3.2 GiB  eta 1:23`."""
    on_gpu = record.get("mem_gib") is not None
    parts = [
        f"step {record['step']}/{total_steps}",
        f"loss {record['loss']:.4f}",
        f"lr {record['lr']:.2e}",
        f"grad {record['grad_norm']:.2f}",
        f"{render_count(record['tokens_per_s_per_gpu'])} tok/s/{'gpu' if on_gpu else 'rank'}",
    ]
    parts += [f"mfu {record['mfu']:.1%}"] if record.get("mfu") is not None else []
    parts += [f"mem {record['mem_gib']:.1f} GiB"] if on_gpu else []
    parts += [f"eta {render_duration(seconds_left)}"] if seconds_left is not None else []
    parts += (
        [f"rank {record['slowest_rank']} slow x{record['straggler']:.1f}{' on the host' if on_gpu else ''}"]
        if record.get("straggler", 1) >= 2
        else []
    )
    parts += ["skipped: gradient not finite"] if record.get("skipped") else []
    return "  ".join(parts)


def render_eval(record: Record, total_steps: int) -> str:
    return (
        f"step {record['step']}/{total_steps}  held-out loss {record['eval_loss']:.4f} ({record['eval_tokens']} tokens)"
    )


def render_count(number: float) -> str:
    """`950`, `12.3k`, `4.5M`."""
    for size, suffix in ((1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}{suffix}"
    return f"{number:.0f}"


def render_duration(seconds: float) -> str:
    """`0:07`, `1:23`, `2:03:04`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def render_bar(step: int, total: int, width: int = 30) -> str:
    """`[##########--------------------] 33 %`."""
    done = width * step // max(1, total)
    return f"[{'#' * done}{'-' * (width - done)}] {100 * step // max(1, total)} %"
