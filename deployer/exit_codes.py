"""The exit codes of the commands, as data for `--help`, docs/using.md and a test that checks each one."""

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
    ExitCode(0, "The job succeeded, and the results asked for are on this machine."),
    ExitCode(ANSWERED_NO, "You answered no to a question, a check of `doctor` failed, or `stop` left processes."),
    ExitCode(USAGE, "The usage or the config has a mistake, or there is no such job."),
    ExitCode(
        NOT_HOME, "The job succeeded, but a result asked for was not pulled. The last line names it and how to get it."
    ),
    ExitCode(RUNS_ON, "The job runs, or may run, without this client: you detached (Ctrl-C), or the client gave up."),
    ExitCode(STALLED, "`--stall-timeout` or `--idle-timeout` ended the job."),
    ExitCode(NOT_DEPLOYED, "The launch failed, the host could not be asked, or the job is lost or never started."),
    ExitCode(INTERRUPTED, "You interrupted it: nothing was started, or it was stopped again at once."),
    ExitCode(UNREAD, "Nothing reads the output any more. A job that was started keeps running."),
    ExitCode(STOPPED, "The job was stopped."),
)
OWN = (
    "The job's own code: that of the rank that failed first, or of a setup that failed; 128+N for signal N. It wins "
    "over 74."
)


def as_rows() -> list[tuple[str, str]]:
    """Code and meaning of each, for `--help`."""
    return [*((f"{one.code:>3}", one.meaning.replace("`", "")) for one in EXIT_CODES), ("other", OWN)]


def as_markdown() -> str:
    """The table of docs/using.md."""
    rows = [f"| {one.code} | {one.meaning} |" for one in EXIT_CODES]
    return "\n".join(["| code | |", "|---|---|", *rows, f"| other | {OWN} |"])
