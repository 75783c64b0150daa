"""Full-screen mode of the terminal: draws lines in place and reads keys. At the end the earlier content is restored,
however the program ends. Like `terminal`, this module may write to the terminal, and it takes only `Shown`.
"""

from __future__ import annotations

import os
import re
import select
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from deployer.printable import Shown
from deployer.terminal import escapes

UP, DOWN = "up", "down"
ENDED = "ended"
"""Returned instead of a key at the end of the input: no key can follow."""
_SEQUENCES = {b"\x1b[A": UP, b"\x1bOA": UP, b"\x1b[B": DOWN, b"\x1bOB": DOWN}


class Part(NamedTuple):
    """A part of a line, in a style of rich (`bold`, `red`)."""

    text: Shown
    style: str = ""


Line = Sequence[Part]


class FullScreen:
    """Draws lines over the whole terminal, and reads keys."""

    def __init__(self, size: Callable[[], tuple[int, int]], draw: Callable[[Sequence[Line]], None]) -> None:
        self._size = size
        self._draw = draw
        self._pressed = b""

    @property
    def size(self) -> tuple[int, int]:
        """The current numbers of columns and lines."""
        return self._size()

    def draw(self, lines: Sequence[Line]) -> None:
        """Draws the lines, and cuts off those that are too wide or too many."""
        self._draw(lines)

    def key(self, within_s: float) -> str:
        """The next key: its letter, UP, DOWN or ENDED; empty for a key without meaning, or if none came in time."""
        if not self._pressed:
            if not select.select([sys.stdin], [], [], within_s)[0]:
                return ""
            self._pressed = os.read(sys.stdin.fileno(), 64)
            if not self._pressed:
                return ENDED
        key, self._pressed = next_key(self._pressed)
        return key


def next_key(pressed: bytes) -> tuple[str, bytes]:
    """The first key in the bytes that a terminal sent, and the remaining bytes."""
    if sequence := re.match(rb"\x1b(?:O.|\[[0-?]*[ -/]*[@-~])?", pressed):
        return _SEQUENCES.get(sequence.group(), ""), pressed[sequence.end() :]
    return (chr(pressed[0]) if 0x20 < pressed[0] < 0x7F else ""), pressed[1:]


@contextmanager
def full_screen() -> Iterator[FullScreen]:
    """Full-screen mode of the terminal on stdin and stdout."""
    import termios
    import tty

    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    console = Console(color_system="auto" if escapes() else None, highlight=False)
    before = termios.tcgetattr(sys.stdin)

    def draw(lines: Sequence[Line]) -> None:
        width, height = console.size
        fit = [[(_sendable(text)[:width], style) for text, style in line] for line in lines[:height]]
        drawn = [Text.assemble(*line, no_wrap=True, overflow="crop") for line in fit]
        live.update(Group(*drawn), refresh=True)

    # sys.stdout is not redirected: _sendable reads its encoding
    with Live(
        console=console, screen=True, auto_refresh=False, redirect_stdout=False, vertical_overflow="crop"
    ) as live:
        try:
            tty.setcbreak(sys.stdin.fileno())  # Ctrl-C still interrupts
            yield FullScreen(lambda: (console.width, console.height), draw)
        finally:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _sendable(text: Shown) -> str:
    """Replaces characters that the terminal's encoding lacks by visible escapes."""
    encoding = sys.stdout.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)
