"""`train.py convert`: converts another tool's task to a task file. Imports no torch."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import click

from trainer.commands.help import CONTEXT, Command
from trainer.config.kinds.convert import Written, note_lines, render
from trainer.config.kinds.dstack import from_dstack
from trainer.config.kinds.recognise import DSTACK, SKYPILOT, expect, read_kind
from trainer.config.kinds.skypilot import from_skypilot
from trainer.console import write_line
from trainer.errors import ConfigError, UserError

HELP = """Convert a SkyPilot or dstack task into a task file.

The task file is one that `run` takes. Keys of FILE that Torchferry does not have are listed on stderr and in comments,
each with the reason.

The keys of FILE show which tool it is for; --as decides where they do not.

\b
Examples:
  python train.py convert sky.yaml
  python train.py convert sky.yaml --out torchferry.yaml
  python deploy.py run torchferry.yaml --ssh gpu

Exit codes: 0 written; 2 FILE is not such a task, or --out exists already or cannot be written.
"""
READERS = {SKYPILOT: from_skypilot, DSTACK: from_dstack}
TOOLS = {SKYPILOT: "SkyPilot", DSTACK: "dstack"}


class ConvertError(UserError):
    """The task file could not be written."""

    exit_code = 2


@click.command("convert", cls=Command, help=HELP, context_settings=CONTEXT)
@click.argument("file", metavar="FILE")
@click.option("--out", "-o", metavar="FILE", help="File to write; - prints it [-].")
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
@click.option("--as", "kind", metavar="KIND", help="Read FILE as this kind if its keys do not tell: skypilot, dstack.")
@click.option("--debug", is_flag=True, help="Show stack traces of errors.")
def convert(file: str, out: str | None, force: bool, kind: str | None, debug: bool) -> None:
    called = click.get_current_context().command_path.removesuffix(" convert")
    program = "python deploy.py" if called in ("convert", "train.py") else called
    task, kind = read_foreign(file, kind, program=program)
    name = out if out not in (None, "-") else "torchferry.yaml"
    start = f"{program} run {shlex.quote(str(name))} --ssh HOST"
    text = render(task, f"From {Path(file).name}, of {TOOLS[kind]}. Run it: {start}")
    if out in (None, "-"):
        write_line(sys.stdout, text.rstrip("\n"))
    else:
        _write(Path(str(out)), text, force=force)
    for line in note_lines(task):
        write_line(sys.stderr, f"note: {line}")
    if out not in (None, "-"):
        write_line(sys.stderr, f"{out} is written. Next: {start}")


def read_foreign(file: str, kind: str | None = None, *, program: str = "deploy.py") -> tuple[Written, str]:
    """Another tool's task as a task file, and the tool's name. Raises ConfigError for another or an unreadable file."""
    found = expect(read_kind(file, named=kind), file, *READERS, program=program)
    try:
        return READERS[found.kind](found.tree, lambda path: Path(path).exists()), found.kind
    except ConfigError as error:
        if error.where:
            raise
        key = error.message.partition(" ")[0]
        raise ConfigError(error.message, where=found.places.of(key), hint=error.hint) from None


def _write(path: Path, text: str, *, force: bool) -> None:
    try:
        with path.open("w" if force else "x", encoding="utf-8") as written:
            written.write(text)
    except FileExistsError:
        raise ConvertError(f"{path} is there already", hint="name another one with --out, or give --force") from None
