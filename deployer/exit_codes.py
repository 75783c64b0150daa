"""With which codes a command ends, as data: `--help`, docs/using.md and a test that walks them follow."""

from __future__ import annotations

from typing import NamedTuple

ANSWERED_NO = 1
USAGE = 2
NOT_HOME = 74
RUNS_ON = 75
STALLED = 124
NOT_DEPLOYED = 125
INTERRUPTED = 130
UNREAD = 141
STOPPED = 143


class ExitCode(NamedTuple):
    code: int
    meaning: str


EXIT_CODES = (
    ExitCode(0, "the job succeeded, and what was asked for of its results is here"),
    ExitCode(ANSWERED_NO, "a question was answered with no; a check of `doctor` fails; `stop` left something"),
    ExitCode(USAGE, "a mistake in usage or config; no such job"),
    ExitCode(
        NOT_HOME, "the job succeeded, and something asked for is not here: the last line says what, and what brings it"
    ),
    ExitCode(RUNS_ON, "the job runs on, or may, without this client: detached (Ctrl-C), or following given up"),
    ExitCode(STALLED, "`--stall-timeout` or `--idle-timeout` ended the job"),
    ExitCode(NOT_DEPLOYED, "it could not be deployed, the host not be asked, or the job is lost or never started"),
    ExitCode(INTERRUPTED, "interrupted, and nothing was started, or it was stopped again at once"),
    ExitCode(UNREAD, "nobody reads the output any more; a job that was started runs on"),
    ExitCode(STOPPED, "the job was stopped"),
)
OWN = "else the job's own: of the rank that failed first, 128+N for signal N. It comes before 74."


def as_text() -> str:
    """A line for each, for `--help`."""
    return "\n".join([*(f"  {one.code:>3}  {one.meaning.replace('`', '')}" for one in EXIT_CODES), f"  {OWN}"])


def as_markdown() -> str:
    """The table of docs/using.md."""
    rows = [f"| {one.code} | {one.meaning} |" for one in EXIT_CODES]
    return "\n".join(["| code | |", "|---|---|", *rows, f"| other | {OWN} |"])
