"""Converts click's usage errors to the two parts that every error has: message and hint.

`trainer/commands/usage.py` does the same for the trainer, which may be installed without this package.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import Any

import click

from deployer.errors import UsageError

LIKE = 0.7
"""Least similarity of two options for a suggestion; click also suggests less similar ones."""
_NUMBERS = {"integer": "a whole number", "float": "a number"}


def in_two_parts(error: click.ClickException) -> UsageError:
    """The error in our words, which do not depend on click's version."""
    ctx: click.Context | None = getattr(error, "ctx", None)
    return UsageError(_message(error), hint=_hint(error, ctx))


def nearest(error: click.NoSuchOption) -> str:
    """The most similar option; empty if none is similar enough."""
    return next(iter(get_close_matches(error.option_name, error.possibilities or (), n=1, cutoff=LIKE)), "")


def _message(error: click.ClickException) -> str:
    if isinstance(error, click.NoSuchOption):
        return f"no such option: {error.option_name}"
    if isinstance(error, click.BadOptionUsage):
        return f"{error.option_name} {'takes no' if 'not take' in error.message else 'needs a'} value"
    if isinstance(error, click.MissingParameter):
        return f"{_name(error)} is missing"
    text = error.message.rstrip(".")
    if isinstance(error, click.BadParameter):
        return f"{_name(error)}: " + re.sub(r"a valid (integer|float)( range)?", lambda m: _NUMBERS[m[1]], text)
    text = re.sub(r"^Got unexpected extra arguments? \((.*)\)$", r"unexpected on the command line: \1", text)
    return text[:1].lower() + text[1:]


def _name(error: click.BadParameter) -> str:
    if error.param is None:
        return str(error.param_hint or "a value")
    return (
        error.param.human_readable_name if isinstance(error.param, click.Argument) else max(error.param.opts, key=len)
    )


def _hint(error: click.ClickException, ctx: click.Context | None) -> str:
    if ctx is None:
        return "--help lists the options"
    program = f"deploy.py {ctx.info_name}" if ctx.parent else ctx.command_path
    if isinstance(error, click.NoSuchOption) and (near := nearest(error)):
        return f"did you mean {near}?"
    if isinstance(error, click.BadOptionUsage):
        takes = next((param for param in ctx.command.params if error.option_name in param.opts), None)
        metavar = getattr(takes, "metavar", None)
        if metavar and "not take" not in error.message:
            each = metavar.replace(" or ", f" or {error.option_name} ")
            return f"write {error.option_name} {each}"
    if isinstance(error, click.MissingParameter):
        return f"write {program} {' '.join(ctx.command.collect_usage_pieces(ctx))}"
    return f"{program} --help lists the options"


class Option(click.Option):
    """An option whose name is added before the error about its value."""

    def handle_parse_result(self, ctx: click.Context, opts: Any, args: list[str]) -> tuple[Any, list[str]]:
        try:
            return super().handle_parse_result(ctx, opts, args)
        except UsageError as error:
            raise UsageError(f"{self.opts[0]}: {error.message}", where=error.where, hint=error.hint) from None
