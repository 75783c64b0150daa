"""`logs`: a job's log, or a part of it, shown and followed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from deployer import terminal
from deployer.agent.job.status import FINAL, nproc_of
from deployer.commands.in_words import exit_code_of, state_line
from deployer.commands.screen import DETACHED, Screen, log_view
from deployer.connection.host import Host
from deployer.errors import LostConnection, UsageError
from deployer.jobs.registry import JobRecord
from deployer.jobs.requests import read_status
from deployer.launch.follow import follow_to_end
from deployer.printable import shown


@dataclass(frozen=True)
class Wanted:
    """Which part of a job's log, and how."""

    follow: bool | None
    tail: int | None
    since: dict[str, float] | None
    """`ago_s` or `unix_s`, both by the host's clock."""
    grep: str | None
    rank: int | None
    node: int | None
    attempt: int | None
    raw: bool
    launcher: bool


def logs(host: Host, job_id: str, wanted: Wanted, *, give_up_s: float) -> int:
    """Shows a log; follows it while the job runs unless told otherwise. Returns the exit code."""
    _check_words(wanted)
    found = read_status(host, job_id)
    job_id, ended = found.job_id, found.status.state in FINAL
    nproc = nproc_of(found.status)
    _check_job(wanted, job_id, nproc)
    live = wanted.follow if wanted.follow is not None else not ended
    view = log_view(bare=wanted.rank is not None or nproc == 1, raw=wanted.raw, launcher=wanted.launcher)
    record = JobRecord(job_id, "", host.ssh, host.root, "", "", host.ssh_key, host.transport)
    screen = Screen(record, tells_attempts=wanted.attempt is None)
    screen.folder = found.path
    screen.state(found.status)
    request = _request(wanted, live=live)
    try:
        final = follow_to_end(
            host.connect, job_id, view=view, watcher=screen, request=request, known=True, give_up_s=give_up_s
        )
    except KeyboardInterrupt:
        if ended:
            raise
        screen.left_behind("", "detached")
        return DETACHED
    except LostConnection as error:
        screen.left_behind(f"gave up following: {error.message}")
        return DETACHED
    if not live or final.state not in FINAL:
        return 0
    terminal.notice(shown(f"{job_id} {state_line(final)}"))
    return exit_code_of(final)


def _check_words(wanted: Wanted) -> None:
    """UsageError for options that do not go together, or a pattern that is none."""
    if wanted.launcher and (wanted.rank is not None or wanted.raw):
        raise UsageError(f"give --launcher or {'--raw' if wanted.raw else '--rank'}, not both")
    try:
        re.compile((wanted.grep or "").encode("utf-8", "surrogateescape"))
    except (re.error, OverflowError, RecursionError) as error:
        raise UsageError(f"--grep {wanted.grep!r} is no regular expression: {error}") from None


def _check_job(wanted: Wanted, job_id: str, nproc: int) -> None:
    """UsageError for what this job has not got."""
    if wanted.node not in (None, 0):
        raise UsageError(f"{job_id} has no node {wanted.node}: it runs on one node, which is node 0")
    if wanted.rank is not None and wanted.rank >= nproc:
        raise UsageError(f"{job_id} has no rank {wanted.rank}, only 0 to {nproc - 1}")
    if wanted.raw and wanted.rank is None and nproc > 1:
        raise UsageError(
            f"--raw gives the bytes of one rank, and {job_id} has {nproc}", hint=f"add --rank R, 0 to {nproc - 1}"
        )


def _request(wanted: Wanted, *, live: bool) -> dict[str, Any]:
    rank = 0 if wanted.raw and wanted.rank is None else wanted.rank
    ranks = None if rank is None else [rank]
    part = {"tail": wanted.tail, "since": wanted.since, "grep": wanted.grep, "attempt": wanted.attempt}
    return {**part, "ranks": ranks, "live": live}
