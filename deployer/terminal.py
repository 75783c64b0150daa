"""Output for people: notices, questions and errors on stderr; tables, facts and answers on stdout. No decisions.

No other module of the client writes to the terminal, except `fullscreen`, `launch.logview` (a log that LogText has
converted) and the byte streams of `exec` and `shell`, which come unchanged from the host, as with ssh. This module
takes text of the type `Shown`, not raw text. Only this module and `fullscreen` use rich.
"""

from __future__ import annotations

import getpass
import json
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deployer.errors import ConnectError, FerryError, UsageError
from deployer.printable import LogText, Shown, shown, shown_lines

if TYPE_CHECKING:
    from rich.table import Table


def escapes() -> bool:
    """Whether control sequences may be sent to a terminal at all."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def is_unicode() -> bool:
    """Whether the encoding of stdout has line and bar characters."""
    return (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"


def _style(text: Shown, **style: Any) -> Shown:
    return Shown(click.style(text, **style)) if escapes() else text


def _write(*parts: Shown, err: bool) -> None:
    """Writes one line. Characters that the terminal's encoding lacks become visible escapes."""
    encoding = (sys.stderr if err else sys.stdout).encoding or "utf-8"
    click.echo("".join(parts).encode(encoding, "backslashreplace").decode(encoding), err=err)


def invoked_as() -> str:
    """The words that call this program again: `python deploy.py` in a checkout, else `torchferry`."""
    script = sys.argv[0]
    if Path(script).name != "deploy.py":
        return "torchferry"
    python = Path(sys.executable)
    if shutil.which(python.name) == sys.executable:
        return f"{python.name} {shlex.quote(script)}"
    near = python.relative_to(Path.cwd()) if python.is_relative_to(Path.cwd()) else python
    return f"{shlex.quote(str(near))} {shlex.quote(script)}"


def typed(path: str) -> Shown:
    """A path as a word of a command to type. It cannot be taken for an option, and bytes that a terminal cannot show
    are written in the form that bash and zsh read."""
    word = f"./{path}" if path.startswith("-") else path
    if shown(word) == word:
        return shown(shlex.quote(word))
    plain = frozenset(range(0x20, 0x7F)) - frozenset(b"\\'")
    escaped = "".join(chr(b) if b in plain else f"\\x{b:02x}" for b in os.fsencode(word))
    return shown(f"$'{escaped}'")


def as_invoked(text: str) -> str:
    """Replaces the program's name in a text of ours by the name that the user called."""
    return _OWN_NAME.sub(lambda _: invoked_as(), text)


# only with a command or a config after it: not a deploy.py in the user's own project
_OWN_NAME = re.compile(
    r"(?<![\w/.-])deploy\.py(?= (?:CONFIG|configs/|run|sft|pretrain|repeat|resume|stop|ps|status|top|logs|plot|report"
    r"|history|pull|push|forget|exec|shell|tunnel|tensorboard|doctor|gc|gpus|completion|train|init|keys|convert)\b)"
)


def notice(*lines: Shown) -> None:
    for line in lines:
        _write(line, err=True)


def say(*lines: Shown) -> None:
    """Writes lines on stdout: the requested output."""
    for line in lines:
        _write(line, err=False)


def say_json(value: object, *, indent: int | None = 1) -> None:
    """Writes a value on stdout as JSON for a script: ASCII without raw control characters, whatever a host sent. With
    `indent=None` it is one line."""
    plain = json.loads(json.dumps(value), parse_constant=str)  # JSON has no NaN
    click.echo(json.dumps(plain, indent=indent).replace("\x7f", "\\u007f"))


def say_script(text: str) -> None:
    """Writes shell text on stdout: unchanged to a file or a pipe, as printable lines to a terminal."""
    if sys.stdout.isatty():
        say(*shown_lines(text))
    else:
        sys.stdout.flush()
        sys.stdout.buffer.write(text.encode("utf-8", "surrogateescape") + b"\n")
        sys.stdout.flush()


def relay() -> Callable[[bytes], None]:
    """Returns a function that shows the stderr output of a helper program, chunk by chunk."""
    text = LogText(colours=escapes())

    def show(data: bytes) -> None:
        sys.stderr.buffer.write(text.feed(data))
        sys.stderr.buffer.flush()

    return show


def drop_unwritten() -> None:
    """Discards buffered output that cannot be written. Python would try to write it again at exit, and fail with its
    own exit code and a stack trace."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (ValueError, AttributeError):  # closed, or never opened
            continue
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)


# --- questions --------------------------------------------------------------------------------------------------------


def has_person(*, as_json: bool = False) -> bool:
    """Whether a person can answer: stdin is a terminal, and no script reads the output."""
    return not as_json and sys.stdin is not None and sys.stdin.isatty()


def confirm(question: Shown, *, declined: Shown) -> None:
    """Asks on the terminal. After a no it shows `declined` and exits with 1. Raises UsageError without a terminal."""
    if not has_person():
        raise UsageError(f"{question} There is no terminal to ask on", hint="add --yes")
    if not click.confirm(question, err=True):
        notice(declined)
        sys.exit(1)


def ask_yes(question: Shown) -> bool:
    """Whether the user typed `yes`."""
    sys.stderr.write(f"{question} [yes/no]: ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("yes", "y")


def ask_secret(prompt: Shown) -> str:
    """Reads a line without showing it. Raises ConnectError at the end of the input."""
    try:
        return getpass.getpass(prompt, stream=sys.stderr)
    except EOFError:
        raise ConnectError("no answer to the question for a password") from None


# --- errors -----------------------------------------------------------------------------------------------------------


def show_error(error: FerryError) -> None:
    """Shows the message, each entry of `where`, and the hint, one line each."""
    _write(_style(Shown("Error: "), fg="red", bold=True), shown(_shortened(error.message)), err=True)
    for line in error.where:
        # a place (`file:line`, `the command line`), or the output of a program or host (`host: …`)
        place = "" if ": " in line else ("on " if line.startswith("the command") else "in ")
        notice(shown(f"  {place}{line}"))
    if error.hint:
        _write(_style(Shown("hint: "), bold=True), shown(as_invoked(error.hint)), err=True)


def _shortened(text: str) -> str:
    """A message without its middle if it is very long, because it may contain a value of any length."""
    return text if len(text) <= 5000 else f"{text[:3000]} … {text[-1500:]}"


# --- figures for the eye ----------------------------------------------------------------------------------------------


def size(number: float) -> str:
    """Bytes for people: 512 B, 3.4 kB, 22.1 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000 or unit == "GB":
            return f"{number:,.0f} {unit}" if unit == "B" else f"{number:,.1f} {unit}"
        number /= 1000
    raise AssertionError("unreachable")


def counted(count: int, what: str) -> str:
    """`1 file`, `1,200 files`."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def number(value: object) -> str:
    """A number for people: a float has four significant digits, and no decimals if it is large."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"


def age(seconds: float) -> str:
    """A duration for people: 42s, 7m, 3h, 2d."""
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f}{unit}"
    return f"{max(seconds, 0):.0f}s"


# --- tables -----------------------------------------------------------------------------------------------------------


def width() -> int | None:
    """The columns of the terminal on stdout; None if stdout is not a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def table(columns: Sequence[Shown], rows: Sequence[Sequence[Shown]], styles: Sequence[str] = ()) -> None:
    """A table on stdout; of any width if stdout is not a terminal. `styles`: the style of each row's second cell."""
    from rich.console import Console

    grid = _grid(columns, rows, styles)
    console = Console(width=width() or 10_000, color_system="auto" if escapes() else None)
    with console.capture() as drawn:
        console.print(grid)
    for line in drawn.get().splitlines():
        _write(Shown(line.rstrip()), err=False)  # contains the colours that rich added


def facts(title: Shown, rows: Sequence[Sequence[Shown]]) -> None:
    """Names and values on stdout, one line each of any length, so that no path is broken."""
    say(_style(title, bold=True))
    width = max((len(name) for name, _ in rows), default=0)
    for name, value in rows:
        say(shown(f"{name:<{width}}  {value}".rstrip()))


def _grid(columns: Sequence[Shown], rows: Sequence[Sequence[Shown]], styles: Sequence[str] = ()) -> Table:
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        grid.add_column(Text(column), no_wrap=number < 2, overflow="fold")
    for number, row in enumerate(rows):
        style = styles[number] if number < len(styles) else ""
        grid.add_row(*(Text(cell, style=style if place == 1 else "") for place, cell in enumerate(row)))
    return grid


Draw = Callable[[Sequence[Shown], Sequence[Sequence[Shown]], Sequence[str]], None]


@contextmanager
def live_table() -> Iterator[Draw]:
    """A table on the terminal of stdout, in the form of `table`. Each call draws it again in place; if there are too
    many rows, only the first ones."""
    from rich.console import Console
    from rich.live import Live

    console = Console(color_system="auto" if escapes() else None)
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:

        def draw(columns: Sequence[Shown], rows: Sequence[Sequence[Shown]], styles: Sequence[str]) -> None:
            room = max(1, console.height - 2)
            live.update(_grid(columns, rows[:room], styles), refresh=True)

        draw([], [], [])
        yield draw


@dataclass(frozen=True)
class Check:
    """A finding of `doctor`."""

    status: str
    """`ok`, `warn` or `fail`."""
    name: Shown
    detail: Shown
    hint: Shown


def checks(items: Sequence[Check]) -> None:
    """Findings on stdout: a mark, the name, the detail and the hint."""
    marks = {
        "ok": _style(Shown("✓"), fg="green"),
        "warn": _style(Shown("!"), fg="yellow"),
        "fail": _style(Shown("✗"), fg="red"),
    }
    for item in items:
        _write(marks.get(item.status, Shown("?")), shown(f" {item.name}: {item.detail}"), err=False)
        if item.hint and item.status != "ok":
            say(shown(f"    → {item.hint}"))


# --- drawings ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Canvas:
    """The limits of stdout for a drawing."""

    width: int
    height: int
    colour: bool
    plain: bool
    """Only ASCII."""


def canvas() -> Canvas:
    """The size of the terminal, or of COLUMNS and LINES; 100 by 30 if neither is known."""
    size = shutil.get_terminal_size((100, 30))
    return Canvas(size.columns, size.lines, colour=escapes() and sys.stdout.isatty(), plain=not is_unicode())


def drawing(lines: Sequence[str]) -> None:
    """Lines on stdout with their colours, and no other escape sequences."""
    for line in lines:
        text = LogText(colours=escapes()).feed(line.encode("utf-8", "backslashreplace"), final=True)
        _write(Shown(text.decode("utf-8")), err=False)


# --- progress ---------------------------------------------------------------------------------------------------------


@contextmanager
def progress(label: Shown) -> Iterator[Callable[[int, int], None]]:
    """A progress bar in bytes on stderr, drawn only if the work takes a while, and a closing line of plain text."""
    begun = time.monotonic()
    bar: Any = None
    last = (0, 0)

    def update(done: int, total: int) -> None:
        nonlocal bar, last
        last = (done, total)
        if bar is None and sys.stderr.isatty() and escapes() and time.monotonic() - begun > 0.3:
            bar = _make_bar(label, total)
        if bar is not None:
            bar.update(0, completed=done, total=total)

    try:
        yield update
    finally:
        if bar is not None:
            bar.stop()
        if last[1]:
            seconds = max(time.monotonic() - begun, 1e-3)
            notice(shown(f"{label}: {size(last[0])} in {seconds:.1f} s ({size(last[0] / seconds)}/s)"))


def _make_bar(label: Shown, total: int) -> Any:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn())
    bar = Progress(*columns, TransferSpeedColumn(), TimeRemainingColumn(), console=Console(stderr=True), transient=True)
    bar.add_task(label, total=total)
    bar.start()
    return bar
