"""The errors, as exceptions with an exit code, a hint and the place of the error."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from deployer.exit_codes import INTERRUPTED, NOT_DEPLOYED, NOT_HOME, RUNS_ON, USAGE

_PLACE = re.compile(r"(?P<file>[^:]+):(?P<line>[1-9]\d{0,8})(?:: |$)")
"""`FILE:LINE`, the form in which the config readers name a place."""


class FerryError(Exception):
    """Base of every error that is shown to the user: `message`, then `where` lines, then a hint. No stack trace.

    The message, the hint and each entry of `where` are shown as one line each, whatever values they contain. Text of
    several lines goes into `where`. `command`: the next command to run, as words after this program's name, if there
    is exactly one. `code` identifies the kind of error for scripts: existing codes never change.
    """

    exit_code = NOT_DEPLOYED
    code = "failed"
    looks: tuple[str, ...] = ()
    """The command that helps with any error of this kind, if there is one."""

    def __init__(
        self, message: str, *, where: str | Sequence[str] = (), hint: str = "", command: Sequence[str] = ()
    ) -> None:
        super().__init__(message)
        self.message = message
        self.where = tuple(filter(None, (where,) if isinstance(where, str) else where))
        self.hint = hint
        self.command = tuple(command) or self.looks
        self.job_id: str | None = None
        """The job that may have been started, for an error during a launch."""
        self.is_in_json = False
        """A JSON on stdout already contains this error."""

    def of_job(self, job_id: str) -> None:
        """Records that this job may have been started despite the error."""
        self.job_id = job_id
        self.command = self.command or ("status", job_id, "--json")

    def as_json(self) -> dict[str, Any]:
        """The error for a script; every key is always present."""
        return {
            "code": self.code,
            "message": self.message,
            "where": [_place(line) for line in self.where],
            "hint": self.hint or None,
            "next": list(self.command) or None,
            "id": self.job_id,
            "exit_code": self.exit_code,
        }


def _place(text: str) -> dict[str, Any]:
    found = _PLACE.match(text)
    return {"text": text, "file": found and found["file"], "line": int(found["line"]) if found else None}


class UsageError(FerryError):
    """The command line or the config is wrong; nothing was started."""

    code = "usage"
    exit_code = USAGE


class ConnectError(FerryError):
    """The host could not be reached, has another key than before, or refused the login."""

    code = "unreachable"


class HostKeyError(ConnectError):
    """The host's key is unknown, differs from the known key, or is no longer trusted."""

    code = "host_key"


class LoginRefused(ConnectError):
    """The host refused all available credentials, or the login needs an answer from a person."""

    code = "login"


class HostError(FerryError):
    """The host was reached and refused: no Python, no space, no such GPU, no usable environment."""

    code = "refused"


class LostConnection(FerryError):
    """The connection broke; the job, if there is one, keeps running."""

    code = "connection_lost"
    exit_code = RUNS_ON


class UnknownJob(FerryError):
    """No job, or more than one, matches this ID."""

    code = "unknown_job"
    exit_code = USAGE
    looks = ("ps", "--all", "--json")


class NotHome(FerryError):
    """A requested file did not arrive, or not completely."""

    code = "not_home"
    exit_code = NOT_HOME


class Interrupted(FerryError):
    """The user pressed Ctrl-C, or ended the input at a question."""

    code = "interrupted"
    exit_code = INTERRUPTED


class ThisMachine(FerryError):
    """A file or a stream on this machine failed: the disk is full, or a folder belongs to another user."""

    code = "this_machine"


class Unforeseen(FerryError):
    """An unexpected error: a bug of ours."""

    code = "internal"
