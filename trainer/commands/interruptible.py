"""Commands that tell of a Ctrl-C by their exit code."""

from __future__ import annotations

import click


def interruptible(told: str) -> type[click.Command]:
    """A kind of command that ends with 130 after a Ctrl-C that nothing in it has heard; click would end with 1."""

    class Interruptible(click.Command):
        def invoke(self, ctx: click.Context) -> object:
            try:
                return super().invoke(ctx)
            except KeyboardInterrupt:
                click.echo(told, err=True)
                ctx.exit(130)

    return Interruptible
