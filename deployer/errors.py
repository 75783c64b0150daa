"""What can go wrong, as exceptions that carry the exit code, a hint and where it happened."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from deployer.exit_codes import INTERRUPTED, NOT_DEPLOYED, NOT_HOME, RUNS_ON, USAGE

_PLACE = re.compile(r"(?P<file>[^:]+):(?P<line>[1-9]\d{0,8})(?:: |$)")
"""`FILE:LINE`, as the readers of configs say where."""


class FerryError(Exception):
    """Base of every error that is the user's to read: `message`, then `where` lines, then a hint. No stack trace.

    A message and a hint are one line each, and so is each line of `where`, whatever the values in them hold: what has
    several lines goes there. `command`: words after this program's name that are the next thing to do, where that is
    one command. `code` is the word by which a script tells the kinds apart: a word once given stays.
    """

    exit_code = NOT_DEPLOYED
    code = "failed"
    looks: tuple[str, ...] = ()
    """The command that helps with any error of this kind, where there is one."""

    def __init__(
        self, message: str, *, where: str | Sequence[str] = (), hint: str = "", command: Sequence[str] = ()
    ) -> None:
        super().__init__(message)
        self.message = message
        self.where = tuple(filter(None, (where,) if isinstance(where, str) else where))
        self.hint = hint
        self.command = tuple(command) or self.looks
        self.job_id: str | None = None
        """The job that may have been started, of an error amid a launch."""
        self.is_in_json = False
        """A JSON on stdout tells of it already."""

    def of_job(self, job_id: str) -> None:
        """Says that this job may have been started all the same."""
        self.job_id = job_id
        self.command = self.command or ("status", job_id, "--json")

    def as_json(self) -> dict[str, Any]:
        """For a script: every key is always there."""
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
    """The host could not be reached, or is not who it was, or let nobody in."""

    code = "unreachable"


class HostKeyError(ConnectError):
    """The host shows a key that is not known, is not the one that is known, or is not trusted any more."""

    code = "host_key"


class LoginRefused(ConnectError):
    """The host lets nobody in with what there is, or wants a person to be asked."""

    code = "login"


class HostError(FerryError):
    """The host was reached and said no: no Python, no space, no such GPU, no usable environment."""

    code = "refused"


class LostConnection(FerryError):
    """The connection broke; the job, if there is one, goes on."""

    code = "connection_lost"
    exit_code = RUNS_ON


class UnknownJob(FerryError):
    """No job, or more than one, answers to this id."""

    code = "unknown_job"
    exit_code = USAGE
    looks = ("ps", "--all", "--json")


class NotHome(FerryError):
    """Something that was asked for did not come, or not whole."""

    code = "not_home"
    exit_code = NOT_HOME


class Interrupted(FerryError):
    """Somebody pressed Ctrl-C, or answered a question with the end of the input."""

    code = "interrupted"
    exit_code = INTERRUPTED


class ThisMachine(FerryError):
    """A file or a stream of this machine failed: its disk is full, a folder belongs to somebody else."""

    code = "this_machine"


class Unforeseen(FerryError):
    """What no code here expects: a mistake of ours."""

    code = "internal"
