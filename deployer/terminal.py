"""What people see: notices and errors on stderr, tables and progress bars. The only user of rich; decides nothing."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deployer.errors import FerryError

if TYPE_CHECKING:
    from rich.table import Table

# what in a host's text could drive the terminal (C0, DEL, C1), turn it around (bidirectional marks) or break it (halves
# of surrogate pairs); tab and newline pass
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def clean(text: object) -> str:
    """Text that came from a host, with what could drive a terminal made visible."""
    return _CONTROL.sub(lambda match: ascii(match.group())[1:-1], str(text))


def escapes() -> bool:
    """Whether a terminal may be given control sequences at all."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _style(text: str, **style: Any) -> str:
    return click.style(text, **style) if escapes() else text


def invoked_as() -> str:
    """How this program was called, to be typed again: `python deploy.py` in a checkout, else `torchferry`."""
    script = sys.argv[0]
    if Path(script).name != "deploy.py":
        return "torchferry"
    python = Path(sys.executable)
    if shutil.which(python.name) == sys.executable:
        return f"{python.name} {shlex.quote(script)}"
    near = python.relative_to(Path.cwd()) if python.is_relative_to(Path.cwd()) else python
    return f"{shlex.quote(str(near))} {shlex.quote(script)}"


def as_invoked(text: str) -> str:
    """A text of ours with the program's name as it was called here."""
    return _OWN_NAME.sub(lambda _: invoked_as(), text)


# not a file of that name which somebody ships
_OWN_NAME = re.compile(
    r"(?<![\w/.-])deploy\.py(?= (?:CONFIG|configs/|run|resume|ps|status|logs|stop|pull|exec|shell|doctor|gc|gpus)\b)"
)


def notice(text: str) -> None:
    click.echo(clean(text), err=True)


def confirm(question: str, *, declined: str) -> None:
    """Asks on the terminal; a no ends the program with 1 and says what it means."""
    if not click.confirm(question, err=True):
        notice(declined)
        sys.exit(1)


def show_error(error: FerryError) -> None:
    """The message, where, and the hint, in the three-line form."""
    click.echo(_style("Error: ", fg="red", bold=True) + _shortened(clean(error.message)), err=True)
    for line in error.where.splitlines():
        # a place (`file:line`, `the command line`), or what somebody said (`host: …`)
        place = "" if ": " in line else ("on " if line.startswith("the command") else "in ")
        click.echo(f"  {place}{clean(line)}", err=True)
    if error.hint:
        click.echo(_style("hint: ", bold=True) + clean(as_invoked(error.hint)), err=True)


def _shortened(text: str) -> str:
    """A message that repeats a value of any length, without the middle of it."""
    return text if len(text) <= 5000 else f"{text[:3000]} … {text[-1500:]}"


def size(number: float) -> str:
    """Bytes for the eye: 512 B, 3.4 kB, 22.1 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000 or unit == "GB":
            return f"{number:,.0f} {unit}" if unit == "B" else f"{number:,.1f} {unit}"
        number /= 1000
    raise AssertionError("unreachable")


def counted(count: int, what: str) -> str:
    """`1 file`, `1,200 files`."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def number(value: object) -> str:
    """A figure for the eye: four significant digits of a float, none behind the point of a large one."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"


def age(seconds: float) -> str:
    """A duration for the eye: 42s, 7m, 3h, 2d."""
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f}{unit}"
    return f"{max(seconds, 0):.0f}s"


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table on stdout; wide enough for whole ids when stdout is no terminal."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else 200
    console = Console(width=width, color_system="auto" if escapes() else None)
    with console.capture() as drawn:
        console.print(_grid(columns, rows))
    for line in drawn.get().splitlines():
        click.echo(line.rstrip())


def facts(title: str, rows: Sequence[tuple[str, object]]) -> None:
    """Names and values on stdout, a line each, however long: nothing is broken in the middle of a path."""
    click.echo(_style(clean(title), bold=True))
    width = max((len(name) for name, _ in rows), default=0)
    for name, value in rows:
        click.echo(f"{name:<{width}}  {clean(value)}".rstrip())


def _grid(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        grid.add_column(Text(clean(column)), no_wrap=number < 2, overflow="fold")
    for row in rows:
        grid.add_row(*(Text(clean(cell)) for cell in row))
    return grid


@contextmanager
def live_table(columns: Sequence[str]) -> Iterator[Callable[[Sequence[Sequence[object]]], None]]:
    """A table on stdout's terminal that each call draws anew in its place; of too many rows the last ones."""
    from rich.console import Console
    from rich.live import Live

    console = Console()
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:

        def draw(rows: Sequence[Sequence[object]]) -> None:
            room = max(1, console.height - 2)
            live.update(_grid(columns, rows[-room:]), refresh=True)

        draw([])
        yield draw


def checks(items: Sequence[Mapping[str, Any]]) -> None:
    """A doctor's findings: a mark, the name, the detail, and what to do."""
    marks = {
        "ok": _style("✓", fg="green"),
        "warn": _style("!", fg="yellow"),
        "fail": _style("✗", fg="red"),
    }
    for item in items:
        click.echo(f"{marks.get(item['status'], '?')} {clean(item['name'])}: {clean(item['detail'])}")
        if item.get("hint") and item["status"] != "ok":
            click.echo(f"    → {clean(item['hint'])}")


@contextmanager
def progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """A byte-progress bar on stderr, drawn when the work lasts; a plain closing line off a terminal."""
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
            notice(f"{label}: {size(last[0])} in {seconds:.1f} s ({size(last[0] / seconds)}/s)")


def _make_bar(label: str, total: int) -> Any:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    bar = Progress(*columns, TransferSpeedColumn(), TimeRemainingColumn(), console=Console(stderr=True), transient=True)
    bar.add_task(label, total=total)
    bar.start()
    return bar
