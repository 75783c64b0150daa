"""The job's logs on the screen: every byte once, by file and offset, also over broken connections."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import BinaryIO

from deployer.agent.host.layout import ALONE, LAUNCHER_LOG, LogName
from deployer.printable import LogText

MAX_LINE = 64 * 1024
"""Bytes of a line without an end that are held back at most."""
BAR_EVERY_S = 1.0
"""Off a terminal, a progress bar that rewrites its line is shown this often at most."""

_CLEAR = b"\r\x1b[K"


@dataclass
class _File:
    out: BinaryIO
    prefix: bytes
    text: LogText
    pending: bytes = b""
    inside_line: bool = False  # a part of the present line was written already
    last_bar: float = -BAR_EVERY_S
    skipped_bar: bytes = b""


@dataclass
class LogView:
    """Writes log chunks to `out` (a rank's output) and `err` (the set-up's own words; torchrun's if `launcher`: of a
    failure it says at length what the summary says in a line).

    Whole lines, each with `[RANK] ` before it unless `bare`; of a job with several groups of processes with
    `[ROLE nodeK rank RANK] `. On a terminal a bar (text that ends in a carriage return) is drawn in place, and the text
    of a `bare` rank appears as it comes; elsewhere a bar is at most one line a second. Of a log's own control sequences
    only colours pass (LogText); of a `raw` rank the bytes pass unchanged, but never to a terminal. `escapes`: the
    terminal knows control sequences. `encoding`: the terminal's.
    `offsets` is what a new connection must ask for to go on without losing or repeating a byte, `marks` which files
    that is of; `has_shown`: whether anything was.
    """

    out: BinaryIO
    err: BinaryIO
    terminal: bool
    bare: bool = False
    raw: bool = False
    launcher: bool = False
    escapes: bool = True
    encoding: str = "utf-8"
    clock: Callable[[], float] = time.monotonic
    offsets: dict[str, int] = field(default_factory=dict)
    marks: dict[str, str] = field(default_factory=dict)
    has_shown: bool = False
    _files: dict[str, _File] = field(default_factory=dict)
    _bar_width: int = 0
    _attempt: int | None = None

    def feed(self, file: str, offset: int, data: bytes) -> None:
        """Takes a chunk; what was seen already is passed over. A gap before it ends the line that was begun."""
        seen = self.offsets.get(file)
        if seen is not None and offset < seen:
            data = data[seen - offset :]
            offset = seen
        self.offsets[file] = offset + len(data)
        name = LogName.parse(file)
        if name is not None and name.attempt != self._attempt:
            self.finish()  # the former attempt's last words come before the next one's first
            self._attempt = name.attempt
        if name is not None and name.file == LAUNCHER_LOG and not self.launcher:
            return
        is_ranks = name is not None and name.rank is not None
        if is_ranks and self.raw and not self.terminal:
            self._write(self.out, data)
            return
        if seen is not None and offset > seen and file in self._files:
            self._finish_line(file)
        if file not in self._files:
            text = LogText(colours=self.escapes, encoding=self.encoding)
            prefix = b"" if name is None or self.bare or self.raw else _prefix(name)
            self._files[file] = _File(self.out_of(file, name), prefix, text)
        state = self._files[file]
        self._show(state, state.text.feed(data))

    def out_of(self, file: str, name: LogName | None) -> BinaryIO:
        """Where to write the lines of this log."""
        return self.out if name is not None and name.rank is not None else self.err

    def _show(self, state: _File, text: bytes) -> None:
        if self._comes_as_it_is(state):
            self._write(state.out, text)
        else:
            self._lines(state, text)

    def _comes_as_it_is(self, state: _File) -> bool:
        return self.terminal and (self.bare or self.raw) and state.out is self.out

    def flush(self) -> None:
        self.out.flush()
        self.err.flush()

    def end_line(self, file: str) -> None:
        """The rest of this file's line will not come."""
        state = self._files.get(file)
        if state is not None:
            self._finish_line(file)
        as_it_is = self.raw if state is None else self._comes_as_it_is(state)
        if as_it_is:
            self._write(self.out, b"\n")

    def finish(self) -> None:
        """Writes what is left without a line end: the last line of a program that did not end it."""
        for file in self._files:
            self._finish_line(file)
        if self._bar_width:
            self._write(self.out, b"\n")
            self._bar_width = 0
        self.flush()

    def _finish_line(self, file: str) -> None:
        state = self._files[file]
        self._show(state, state.text.feed(b"", final=True))
        text = state.pending or state.skipped_bar
        if text or state.inside_line:
            self._put_line(state, text)
        state.pending = state.skipped_bar = b""

    def _lines(self, state: _File, data: bytes) -> None:
        text = state.pending + data
        if b"\r" not in text and b"\n" in text:  # nearly always, and much faster than line by line
            lines, _, text = text.rpartition(b"\n")
            state.skipped_bar = b""
            self._put_line(state, lines.replace(b"\n", b"\n" + state.prefix))
        # a CR at the very end may be half of CR LF: it waits for the next byte
        hold = b"\r" if text.endswith(b"\r") else b""
        parts = re.split(rb"(\r?\n|\r)", text[: len(text) - len(hold)])
        for line, end in zip(parts[::2], parts[1::2], strict=False):
            if end == b"\r":
                self._put_bar(state, line)
            else:
                state.skipped_bar = b""
                self._put_line(state, line)
        rest = parts[-1]
        if len(rest) > MAX_LINE:
            self._put_part(state, rest)
            rest = b""
        state.pending = rest + hold

    def _put_line(self, state: _File, line: bytes) -> None:
        self._put_part(state, line + b"\n")
        state.inside_line = False

    def _put_part(self, state: _File, part: bytes) -> None:
        self._clear_bar(self.out)
        self._write(state.out, part if state.inside_line else state.prefix + part)
        state.inside_line = True

    def _put_bar(self, state: _File, line: bytes) -> None:
        if not line:
            return
        if self.terminal:
            self._clear_bar(state.out)
            self._write(state.out, state.prefix + line)
            self._bar_width = len(state.prefix + line)
        elif self.clock() - state.last_bar >= BAR_EVERY_S:
            state.last_bar, state.skipped_bar = self.clock(), b""
            self._put_line(state, line)
        else:
            state.skipped_bar = line

    def _clear_bar(self, out: BinaryIO) -> None:
        if self._bar_width:
            self._write(out, _CLEAR if self.escapes else b"\r" + b" " * self._bar_width + b"\r")
            self._bar_width = 0

    def _write(self, out: BinaryIO, data: bytes) -> None:
        self.has_shown = True
        out.write(data)


def _prefix(name: LogName) -> bytes:
    """What stands before a line, to tell it from those of others."""
    if name.group == ALONE:
        return b"" if name.rank is None else b"[%d] " % name.rank
    return b"[%s] " % name.writer.encode("ascii")
