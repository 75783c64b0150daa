"""A mistake in the command line, found by click, in the two parts that every error has. Imports no torch."""

from __future__ import annotations

import re
from difflib import get_close_matches

import click

from trainer.errors import UserError

LIKE = 0.7
"""Minimum similarity of two options for one to be a typo of the other; click also suggests less similar ones."""
_NUMBERS = {"integer": "a whole number", "float": "a number"}


def in_two_parts(error: click.ClickException, command: click.Command, program: str) -> UserError:
    """The error in our words, which do not depend on click's version. `program`: the name that the command was called
    by."""
    hint = f"{program} --help lists the options"
    text = error.message.rstrip(".")
    if isinstance(error, click.NoSuchOption):
        near = get_close_matches(error.option_name, error.possibilities or (), n=1, cutoff=LIKE)
        return UserError(f"no such option: {error.option_name}", hint=f"did you mean {near[0]}?" if near else hint)
    if isinstance(error, click.BadOptionUsage):
        if "not take" in text:
            return UserError(f"{error.option_name} takes no value", hint=hint)
        takes = next((param for param in command.params if error.option_name in param.opts), None)
        metavar = getattr(takes, "metavar", None)
        return UserError(
            f"{error.option_name} needs a value", hint=f"write {error.option_name} {metavar}" if metavar else hint
        )
    if isinstance(error, click.MissingParameter) and error.ctx is not None:
        line = f"{program} {' '.join(command.collect_usage_pieces(error.ctx))}"
        return UserError(f"{_name(error)} is missing", hint=f"write {line}")
    if isinstance(error, click.BadParameter):
        text = re.sub(r"a valid (integer|float)( range)?", lambda found: _NUMBERS[found[1]], text)
        if isinstance(error.param, click.Argument):
            hint = f"{program} --help explains it"
            if "is not one of" in text:
                hint = f"write one of these; {program} --help explains them"
        return UserError(f"{_name(error)}: {text}", hint=hint)
    text = re.sub(r"^Got unexpected extra arguments? \((.*)\)$", r"unexpected on the command line: \1", text)
    return UserError(text[:1].lower() + text[1:], hint=hint)


def _name(error: click.BadParameter) -> str:
    if error.param is None or error.param_hint is not None:
        return str(error.param_hint or "a value")
    return (
        error.param.human_readable_name if isinstance(error.param, click.Argument) else max(error.param.opts, key=len)
    )
