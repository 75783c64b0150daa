"""How a help is wrapped: never inside the name of an option, which somebody may copy or search for."""

from __future__ import annotations

import re
from collections.abc import Iterable

import click

_OPTION = re.compile(r"--\w+(?:-\w+)+")
_GLUE = "\u2011"
"""A hyphen at which no line is broken; what is shown has plain ones."""


class Formatter(click.HelpFormatter):
    def write_text(self, text: str) -> None:
        super().write_text(_glued(text))

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        super().write_dl([(first, _glued(second)) for first, second in rows], col_max, col_spacing)

    def getvalue(self) -> str:
        return super().getvalue().replace(_GLUE, "-")


class Context(click.Context):
    formatter_class = Formatter


def _glued(text: str) -> str:
    return _OPTION.sub(lambda option: option[0].replace("-", _GLUE), text)
