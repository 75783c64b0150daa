"""What can go wrong, as exceptions that carry the exit code, a hint and where it happened."""

from __future__ import annotations

from collections.abc import Sequence

from deployer.exit_codes import NOT_DEPLOYED, NOT_HOME, RUNS_ON, USAGE


class FerryError(Exception):
    """Base of every error that is the user's to read: `message`, then `where` lines, then a hint. No stack trace.

    A message and a hint are one line each, and so is each line of `where`, whatever the values in them hold: what has
    several lines goes there.
    """

    exit_code = NOT_DEPLOYED

    def __init__(self, message: str, *, where: str | Sequence[str] = (), hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.where = tuple(filter(None, (where,) if isinstance(where, str) else where))
        self.hint = hint


class UsageError(FerryError):
    """The command line or the config is wrong; nothing was started."""

    exit_code = USAGE


class ConnectError(FerryError):
    """The host could not be reached, or is not who it was, or let nobody in."""


class HostError(FerryError):
    """The host was reached and said no: no Python, no space, no such GPU, no usable environment."""


class LostConnection(FerryError):
    """The connection broke; the job, if there is one, goes on."""

    exit_code = RUNS_ON


class UnknownJob(FerryError):
    """No job, or more than one, answers to this id."""

    exit_code = USAGE


class NotHome(FerryError):
    """Something that was asked for did not come, or not whole."""

    exit_code = NOT_HOME
