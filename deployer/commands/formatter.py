"""The layout of help texts: options in groups, and no line break inside an option's name, so that it can be copied."""

from __future__ import annotations

import re
from collections.abc import Iterable

import click

_OPTION = re.compile(r"--\w+(?:-\w+)+")
_GLUE = "\u2011"
"""A hyphen that allows no line break; the output has plain hyphens instead."""

CONNECTION = frozenset({"--ssh-key", "--accept-new-host-key", "--transport", "--connect-timeout", "--remote-root"})
"""Options of every command with a host; the help lists them last."""
WIDEST = 25
"""Columns for an option and its value in the help; for a longer one the text begins on the next line."""


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


def _joined(row: tuple[str, str]) -> tuple[str, str]:
    """`--dry-run[=remote]`: removes the blank before the value, because it is typed without one."""
    return row[0].replace(" [=", "[="), row[1]


def write_options(command: click.Command, ctx: click.Context, formatter: click.HelpFormatter) -> None:
    """Writes the command's options, then the connection options as a group, and --help at the end."""
    options = [param for param in command.get_params(ctx) if isinstance(param, click.Option)]
    rows = {option: _joined(row) for option in options if (row := option.get_help_record(ctx)) is not None}
    connects = any("--ssh-key" in option.opts for option in rows)
    connection = [row for option, row in rows.items() if connects and CONNECTION.intersection(option.opts)]
    *own, last = [row for row in rows.values() if row not in connection]
    groups = [("Options", own), ("Connection", connection), ("", [last])]
    width = min(max(len(words) for words, _ in rows.values()), WIDEST)
    for title, group in groups if connection else [("Options", [*own, last])]:
        with formatter.section(title) if title else formatter.indentation():
            if not title:
                formatter.write_paragraph()
            formatter.write_dl([(f"{words:<{width}}", text) for words, text in group], col_max=width)
