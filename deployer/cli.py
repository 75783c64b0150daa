"""The command line. Heavy imports are inside the commands, so that `--help` is instant."""

from __future__ import annotations

import fcntl
import os
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from typing import IO

import click

from deployer.commands.complete import cli as complete_cli
from deployer.commands.complete.cli import VARIABLE
from deployer.commands.host import cli as host_cli
from deployer.commands.launch import cli as launch_cli
from deployer.commands.look import cli as look_cli
from deployer.commands.options import CONTEXT, Commands
from deployer.commands.training import COMMANDS as TRAINING
from deployer.commands.training import FORWARDED
from deployer.commands.usage import in_two_parts
from deployer.error_json import error_as_json
from deployer.errors import FerryError, Interrupted, LostConnection, ThisMachine, Unforeseen, UsageError
from deployer.printable import shown, shown_lines
from deployer.terminal import (
    drop_unwritten,
    invoked_as,
    notice,
    say,
    say_json,
    show_error,
)

HELP = """Launch a job on any machine you can ssh to, watch it, pull its results.

`deploy.py CONFIG` means `deploy.py run CONFIG`. A job keeps running when this program ends or the network fails. `ps`
lists it; `logs`, `stop` and `pull` take its ID.

\b
Examples:
  deploy.py sft --model Qwen/Qwen2.5-0.5B-Instruct --data my.jsonl --ssh gpu
  deploy.py run --ssh root@host:22 --gpus 0,1 -- python my_train.py
  deploy.py run my.yaml --ssh gpu --dry-run    # without network
  deploy.py run my.yaml target.device=cpu      # on this machine, without GPU
"""


@click.group(cls=Commands, context_settings=CONTEXT, invoke_without_command=True, help=HELP)
@click.version_option(package_name="torchferry", prog_name="torchferry")
@click.option("--debug", is_flag=True, help="Show stack traces of errors.")
@click.pass_context
def cli(ctx: click.Context, debug: bool) -> None:
    if ctx.invoked_subcommand is None:
        say(*shown_lines(ctx.get_help()))


for command in (*launch_cli.COMMANDS, *look_cli.COMMANDS, *host_cli.COMMANDS, *complete_cli.COMMANDS, *TRAINING):
    cli.add_command(command)


def main() -> None:
    """Entry point of `deploy.py` and of the console script."""
    try:
        _main()
    finally:
        drop_unwritten()


def _main() -> None:
    _read_names_as_utf8()
    home = os.environ.get("HOME", "")
    if not home.startswith("/") or not home.strip("/"):
        from deployer.agent.guard import correct_home  # rarely needed

        correct_home(must_be_ours=False)  # under sudo, root may use the home of the caller
    _open_standard_streams()
    if asked := os.environ.get(VARIABLE):
        from deployer.commands.complete.answer import answer

        sys.exit(answer(cli, asked))
    words = sys.argv[1:]
    own = words[: words.index("--")] if "--" in words else words
    threading.excepthook = lambda broken: notice(*shown_lines("".join(traceback.format_exception(broken.exc_value))))
    debug = "--debug" in own
    if debug and words[0] not in FORWARDED:
        words.remove("--debug")
    try:
        cli(words, prog_name=invoked_as(), standalone_mode=False)
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except (click.ClickException, click.Abort, KeyboardInterrupt, Exception) as error:
        sys.exit(_told(error, debug=debug, as_json="--json" in own))


def _told(error: BaseException, *, debug: bool, as_json: bool) -> int:
    """Reports the error on stderr, and with --json also on stdout, unless a JSON there already contains it. Returns the
    exit code."""
    if isinstance(error, click.ClickException):
        known: FerryError = in_two_parts(error)
    elif isinstance(error, click.Abort | KeyboardInterrupt):
        known = Interrupted("interrupted")
    else:
        known = error if isinstance(error, FerryError) else _unforeseen(error)
    with suppress(OSError):  # stderr is full or closed: the exit code is enough
        if isinstance(error, click.Abort | KeyboardInterrupt):
            notice(shown(known.message))
        else:
            if debug and not isinstance(error, click.ClickException):
                notice(*shown_lines("".join(traceback.format_exception(error))))
            _show(known)
    if as_json and not known.is_in_json:
        with suppress(OSError):  # stdout is full or closed: the exit code is enough
            say_json({"error": error_as_json(known)}, indent=None)
    return known.exit_code


def _read_names_as_utf8() -> None:
    """Restarts this program in Python's UTF-8 mode if the locale has another encoding. A file name is bytes. As text,
    here and on the host, it is decoded as UTF-8 with `surrogateescape`, in any locale."""
    if sys.getfilesystemencoding() == "utf-8":
        return
    try:
        argv = Path("/proc/self/cmdline").read_bytes().split(b"\0")[1:-1]
    except OSError:
        argv = [os.fsencode(word) for word in sys.orig_argv[1:]]
    os.execv(sys.executable, [os.fsencode(sys.executable), b"-X", b"utf8", *argv])


def _is_read_only(stream: IO[str]) -> bool:
    try:
        return fcntl.fcntl(stream, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    except OSError:  # a stream without a descriptor, as in a test: io.UnsupportedOperation
        return False


def _open_standard_streams() -> None:
    """Replaces a standard stream that was closed at the start by /dev/null, so that no file or socket gets its number.
    Does the same with an output that is open read-only: a shell that was started without an output opens its script
    under that number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
        elif mode == "w" and _is_read_only(stream):
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, stream.fileno())
            os.close(null)


def _unforeseen(error: BaseException) -> FerryError:
    """Converts an unexpected exception: from this machine's disk, an answer of another shape, or a bug of ours."""
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return ThisMachine(f"this machine: {where}{error.strerror or error}")
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] not in ("deployer", "trainer"):
        hint = "activate the environment that Torchferry is installed in"
        return UsageError(f"{sys.executable} has no {error.name}", hint=hint)
    return Unforeseen(f"Torchferry failed: {error!r}", hint="--debug shows where; please report it")


def _show(error: FerryError) -> None:
    show_error(error)
    if isinstance(error, LostConnection):
        notice(shown(f"The job, if it was started, runs on: {invoked_as()} ps shows it."))
