"""A whole terminal for a while: lines drawn in place, and the keys that are pressed. What stood there before comes
back, however the program ends. Beside `terminal`, the only one who writes there: it takes `Shown` alone.
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
"""In the place of a key: nobody can press one any more."""
_SEQUENCES = {b"\x1b[A": UP, b"\x1bOA": UP, b"\x1b[B": DOWN, b"\x1bOB": DOWN}


class Part(NamedTuple):
    """A stretch of a line, in a style of rich's (`bold`, `red`)."""

    text: Shown
    style: str = ""


Line = Sequence[Part]


class FullScreen:
    """Draws lines over the whole terminal, and hears keys."""

    def __init__(self, size: Callable[[], tuple[int, int]], draw: Callable[[Sequence[Line]], None]) -> None:
        self._size = size
        self._draw = draw
        self._pressed = b""

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines, as they are now."""
        return self._size()

    def draw(self, lines: Sequence[Line]) -> None:
        """What is too wide or too many is cut off."""
        self._draw(lines)

    def key(self, within_s: float) -> str:
        """The next key as its letter, UP or DOWN; empty for one of no meaning, or when none was pressed in time."""
        if not self._pressed:
            if not select.select([sys.stdin], [], [], within_s)[0]:
                return ""
            self._pressed = os.read(sys.stdin.fileno(), 64)
            if not self._pressed:
                return ENDED
        key, self._pressed = next_key(self._pressed)
        return key


def next_key(pressed: bytes) -> tuple[str, bytes]:
    """The first key of what a terminal sends, and the rest of it."""
    if sequence := re.match(rb"\x1b(?:O.|\[[0-?]*[ -/]*[@-~])?", pressed):
        return _SEQUENCES.get(sequence.group(), ""), pressed[sequence.end() :]
    return (chr(pressed[0]) if 0x20 < pressed[0] < 0x7F else ""), pressed[1:]


@contextmanager
def full_screen() -> Iterator[FullScreen]:
    """Of the terminal that is stdin and stdout."""
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

    # sys.stdout stays what it is: its encoding is asked for
    with Live(
        console=console, screen=True, auto_refresh=False, redirect_stdout=False, vertical_overflow="crop"
    ) as live:
        try:
            tty.setcbreak(sys.stdin.fileno())  # Ctrl-C stays what it is
            yield FullScreen(lambda: (console.width, console.height), draw)
        finally:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _sendable(text: Shown) -> str:
    """What the terminal's own encoding lacks is made visible."""
    encoding = sys.stdout.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)
