"""Mistakes that the user can put right: told in one paragraph, without a stack trace, exit code 2."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from trainer.console import shown
from trainer.words import shortened

COMMAND_LINE = "the command line"
MAX_MESSAGE = 900
_PLACE = re.compile(r"(?P<file>[^:]+):(?P<line>[1-9]\d{0,8})(?:: |$)")
SHORT_HINT = 100
"""A list of all keys is no help beside twenty of its kind."""
MAX_MISTAKES = 50
"""So many are shown."""


class UserError(Exception):
    """`message` says what is wrong with which value, `where` it stands, `hint` what to do: a line each. Of several
    mistakes `where` has a line each."""

    exit_code = 2
    has_lines = True
    """Its text has several, and each is printable."""

    def __init__(self, message: str, *, where: str | Sequence[str] = "", hint: str = "") -> None:
        super().__init__(message)
        self.message = shortened(message, MAX_MESSAGE)  # somebody's file may be quoted in it
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
        """For a script: the keys of the deployer's errors, each always there (docs/automation.md)."""
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
    """The config is wrong and nothing was started."""

    errors: tuple[ConfigError, ...] = ()
    """What it tells at once, where that is several."""


def _in_a_line(error: ConfigError) -> str:
    """`a.yaml:3: train.step is not a key; did you mean train.steps?`"""
    assert isinstance(error.where, str)
    return f"{error.where or 'config'}: {error.message}" + (
        f"; {error.hint}" if 0 < len(error.hint) <= SHORT_HINT else ""
    )


def together(errors: Iterable[ConfigError]) -> ConfigError | None:
    """The one mistake as it is; several as one error, with a line for each."""
    flat = [one for error in errors for one in error.errors or (error,)]
    if len(flat) < 2:
        return flat[0] if flat else None
    more = len(flat) - MAX_MISTAKES
    lines = [_in_a_line(error) for error in flat[:MAX_MISTAKES]]
    told = ConfigError(f"{len(flat)} mistakes", where=lines, hint=f"{more} more follow" if more > 0 else "")
    told.errors = tuple(flat)
    return told


def raise_all(errors: Iterable[ConfigError]) -> None:
    """Raise what was found wrong, if anything was."""
    error = together(errors)
    if error is not None:
        raise error


class DataError(UserError):
    """Data that cannot be trained on."""


class ModelError(UserError):
    """A model that cannot be built, read or written as asked."""
