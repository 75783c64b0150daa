"""The job's logs on the screen: every byte once, identified by file and offset, also over broken connections."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import BinaryIO

from deployer.agent.host.layout import ALONE, LAUNCHER_LOG, LogName
from deployer.printable import LogText

MAX_LINE = 64 * 1024
"""How many bytes of a line without an end are held back at most."""
BAR_EVERY_S = 1.0
"""Seconds between two lines of a progress bar that rewrites its line, if the output is not a terminal."""

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
    """Writes log chunks to `out` (a rank's output) and to `err` (prepare.log; with `launcher` also torchrun's log,
    which repeats at length what the summary says in a line).

    It writes whole lines, each with `[RANK] ` before it unless `bare`; if the job has several groups of processes, with
    `[ROLE nodeK rank RANK] `. On a terminal a progress bar (text that ends in a carriage return) is drawn in place, and
    the text of a `bare` rank appears as it arrives. Elsewhere a bar gives at most one line a second. Of a log's control
    sequences only colours are kept (LogText). The bytes of a `raw` rank are written unchanged, but never to a terminal.
    `escapes`: whether the terminal knows control sequences. `encoding`: the terminal's.
    `offsets`: what a new connection must request so that no byte is lost or repeated. `marks`: which files these
    offsets belong to. `has_shown`: whether anything was written.
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
        """Takes a chunk and skips the bytes that were already seen. A gap before the chunk ends the line that was
        begun."""
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
        """The stream for the lines of this log."""
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
        """Ends the current line of this file: its rest will not arrive."""
        state = self._files.get(file)
        if state is not None:
            self._finish_line(file)
        as_it_is = self.raw if state is None else self._comes_as_it_is(state)
        if as_it_is:
            self._write(self.out, b"\n")

    def finish(self) -> None:
        """Writes the last lines that have no line end."""
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
    """The prefix of a line: the process that wrote it."""
    if name.group == ALONE:
        return b"" if name.rank is None else b"[%d] " % name.rank
    return b"[%s] " % name.writer.encode("ascii")
