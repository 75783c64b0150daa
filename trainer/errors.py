"""Errors that the user can correct: printed as one paragraph without a stack trace, exit code 2."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from trainer.console import shown
from trainer.words import shortened

COMMAND_LINE = "the command line"
MAX_MESSAGE = 900
_PLACE = re.compile(r"(?P<file>[^:]+):(?P<line>[1-9]\d{0,8})(?:: |$)")
SHORT_HINT = 100
"""Characters. Among several mistakes longer hints are left out: twenty lists of all keys would not help."""
MAX_MISTAKES = 50
"""The number of mistakes shown at once."""


class UserError(Exception):
    """`message`: what is wrong with which value; `where`: its file and line; `hint`: what to do. Each is one line; for
    several mistakes, `where` has a line for each."""

    exit_code = 2
    has_lines = True
    """The error's text has several lines, and each is printable."""

    def __init__(self, message: str, *, where: str | Sequence[str] = "", hint: str = "") -> None:
        super().__init__(message)
        self.message = shortened(message, MAX_MESSAGE)  # it may quote the user's file
        self.where = where
        self.hint = shortened(hint, MAX_MESSAGE)

    def __str__(self) -> str:
        lines = [shown(self.message)]
        if isinstance(self.where, str):
            place = "on" if self.where == COMMAND_LINE else "in"
            lines += [f"  {place} {shown(self.where)}"] if self.where else []
        else:
            lines += [f"  {shown(line)}" for line in self.where]
        if self.hint:
            lines.append(f"hint: {shown(self.hint)}")
        return "\n".join(lines)

    def render(self) -> str:
        return f"Error: {self}"

    def as_json(self) -> dict[str, object]:
        """For scripts: the same keys as the deployer's errors, all always present (docs/automation.md)."""
        lines = [self.where] if isinstance(self.where, str) else self.where
        return {
            "code": "usage",
            "message": self.message,
            "where": [_place(line) for line in lines if line],
            "hint": self.hint or None,
            "next": None,
            "id": None,
            "exit_code": self.exit_code,
        }


def _place(line: str) -> dict[str, object]:
    found = _PLACE.match(line)
    return {"text": line, "file": found and found["file"], "line": int(found["line"]) if found else None}


class ConfigError(UserError):
    """The config is wrong, and nothing was started."""

    errors: tuple[ConfigError, ...] = ()
    """The single errors, if this one combines several."""


def _in_a_line(error: ConfigError) -> str:
    """`a.yaml:3: train.step is not a key; did you mean train.steps?`"""
    assert isinstance(error.where, str)
    return f"{error.where or 'config'}: {error.message}" + (
        f"; {error.hint}" if 0 < len(error.hint) <= SHORT_HINT else ""
    )


def together(errors: Iterable[ConfigError]) -> ConfigError | None:
    """A single error unchanged; several as one error with a line for each. None if there are none."""
    flat = [one for error in errors for one in error.errors or (error,)]
    if len(flat) < 2:
        return flat[0] if flat else None
    more = len(flat) - MAX_MISTAKES
    lines = [_in_a_line(error) for error in flat[:MAX_MISTAKES]]
    told = ConfigError(f"{len(flat)} mistakes", where=lines, hint=f"{more} more follow" if more > 0 else "")
    told.errors = tuple(flat)
    return told


def raise_all(errors: Iterable[ConfigError]) -> None:
    """Raise the errors as one; return if there are none."""
    error = together(errors)
    if error is not None:
        raise error


class DataError(UserError):
    """The data cannot be used for training."""


class ModelError(UserError):
    """The model cannot be built, read or written as requested."""
