"""Mistakes that the user can put right: told in one paragraph, without a stack trace, exit code 2."""

from __future__ import annotations

from trainer.console import shown

COMMAND_LINE = "the command line"


class UserError(Exception):
    """`message` says what is wrong with which value, `where` it stands, `hint` what to do: a line each."""

    exit_code = 2
    has_lines = True
    """Its text has several, and each is printable."""

    def __init__(self, message: str, *, where: str = "", hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        lines = [shown(self.message)]
        if self.where:
            lines.append(f"  {'on' if self.where == COMMAND_LINE else 'in'} {shown(self.where)}")
        if self.hint:
            lines.append(f"hint: {shown(self.hint)}")
        return "\n".join(lines)

    def render(self) -> str:
        return f"Error: {self}"


class ConfigError(UserError):
    """The config is wrong and nothing was started."""


class DataError(UserError):
    """Data that cannot be trained on."""


class ModelError(UserError):
    """A model that cannot be built, read or written as asked."""
