"""Commands that tell of a Ctrl-C by their exit code."""

from __future__ import annotations

import os

import click

from trainer.commands.help import Command
from trainer.console import write_error


def interruptible(told: str, **by_option: str) -> type[Command]:
    """A kind of command that ends with 130 after a Ctrl-C that nothing in it has heard; click would end with 1.

    Then it says `told`, or what `by_option` has for an option that was given; of several ranks the first alone.
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
