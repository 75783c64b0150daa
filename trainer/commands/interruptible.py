"""Commands whose exit code reports a Ctrl-C."""

from __future__ import annotations

import os

import click

from trainer.commands.help import Command
from trainer.console import write_error


def interruptible(told: str, **by_option: str) -> type[Command]:
    """A command class that exits with 130 after a Ctrl-C that nothing else handles; click would exit with 1.

    Then it prints `told`, or the text in `by_option` for an option that was given; with several ranks only rank 0
    prints.
    """

    class Interruptible(Command):
        def invoke(self, ctx: click.Context) -> object:
            try:
                return super().invoke(ctx)
            except KeyboardInterrupt:
                if os.environ.get("RANK", "0") == "0":
                    words = (words for option, words in by_option.items() if ctx.params.get(option))
                    write_error(next(words, told))
                ctx.exit(130)

    return Interruptible
