"""`logs`: shows and follows a job's log, or a part of it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from deployer import terminal
from deployer.agent.host.layout import GroupName
from deployer.agent.job.status import FINAL, State
from deployer.agent.job.views import Processes
from deployer.commands.in_words import exit_code_of, state_line
from deployer.commands.json_lines import json_view
from deployer.commands.screen import Screen, ending_in_order, is_unread, log_view
from deployer.connection.host import Host
from deployer.errors import LostConnection, UsageError
from deployer.exit_codes import RUNS_ON
from deployer.jobs.registry import JobRecord
from deployer.jobs.requests import read_status
from deployer.launch.follow import follow_to_end
from deployer.launch.logview import LogView
from deployer.printable import shown


@dataclass(frozen=True)
class LogsRequest:
    """The part of a job's log to show, and in which form."""

    follow: bool | None
    tail: int | None
    since: dict[str, float] | None
    """`ago_s` or `unix_s`; the host compares both with its own clock."""
    grep: str | None
    role: str | None
    node: int | None
    rank: int | None
    attempt: int | None
    raw: bool
    launcher: bool
    as_json: bool = False


def logs(host: Host, job_id: str, wanted: LogsRequest, *, give_up_s: float) -> int:
    """Shows a log, and by default follows it while the job runs. Returns the exit code."""
    _check_words(wanted)
    found = read_status(host, job_id)
    job_id, ended = found.job_id, found.status.state in FINAL
    groups = found.processes
    chosen = _choose(groups, wanted, job_id)
    has_one = len(groups) == 1 and len(groups[0].ranks) == 1  # if there are several, more may start
    bare = len(chosen) == 1 and (has_one or wanted.rank is not None)
    live = wanted.follow if wanted.follow is not None else not ended
    if wanted.as_json:
        view: LogView = json_view(launcher=wanted.launcher)
    else:
        view = log_view(bare=bare, raw=wanted.raw, launcher=wanted.launcher)
    record = JobRecord(job_id, "", host.ssh, host.root, "", "", host.ssh_key, host.transport)
    screen = Screen(record, tells_attempts=wanted.attempt is None)
    screen.folder = found.path
    screen.state(found.status)
    request = _request(wanted, chosen, live=live)
    try:
        with ending_in_order():
            final = follow_to_end(
                host.connect, job_id, view=view, watcher=screen, request=request, known=True, give_up_s=give_up_s
            )
    except KeyboardInterrupt:
        if ended:
            raise
        screen.left_behind("", "detached")
        return _end(wanted, job_id, screen.known_state, None, RUNS_ON)
    except LostConnection as error:
        screen.left_behind(f"gave up following: {error.message}")
        return _end(wanted, job_id, screen.known_state, None, RUNS_ON)
    except OSError as error:
        if ended or is_unread(error):
            raise
        terminal.drop_unwritten()  # such as the log if the disk is full
        screen.left_behind(f"gave up following: {error.strerror or error}")
        return RUNS_ON
    narrowed = wanted.grep is not None or wanted.tail is not None or wanted.since is not None
    if not view.has_shown and not narrowed and not screen.tells_of_changes:
        who = ", ".join(GroupName().rank(rank) for group in chosen for rank in group.ranks) if bare else job_id
        terminal.notice(shown(f"{who} has written nothing{'' if ended else ' yet'}"))
    code = exit_code_of(final) if live and final.state in FINAL else 0
    if live and final.state in FINAL:
        terminal.notice(shown(f"{job_id} {state_line(final)}"))
    return _end(wanted, job_id, final.state, final.code, code)


def _end(wanted: LogsRequest, job_id: str, state: State | None, code: int | None, exit_code: int) -> int:
    """Prints the last line for a script; returns the exit code unchanged."""
    if wanted.as_json:
        end = {"id": job_id, "state": state, "code": code, "exit_code": exit_code}
        terminal.say_json({"end": end}, indent=None)
    return exit_code


def _check_words(wanted: LogsRequest) -> None:
    """Raises UsageError for options that exclude each other, or an invalid pattern."""
    if wanted.raw and wanted.as_json:
        raise UsageError("--raw gives bytes as they are, --json says whose they are", hint="give one of the two")
    if wanted.launcher and (wanted.rank is not None or wanted.raw):
        raise UsageError(f"give --launcher or {'--raw' if wanted.raw else '--rank'}, not both")
    try:
        re.compile((wanted.grep or "").encode("utf-8", "surrogateescape"))
    except (re.error, OverflowError, RecursionError) as error:
        raise UsageError(f"--grep {wanted.grep!r} is no regular expression: {error}") from None


def _choose(groups: Sequence[Processes], wanted: LogsRequest, job_id: str) -> list[Processes]:
    """The groups whose log is requested, each with the requested ranks. Raises UsageError if the job does not have
    one."""
    roles = sorted({group.role for group in groups})
    if wanted.role is not None and wanted.role not in roles:
        named = ", ".join(filter(None, roles))
        there = f", only {named}" if named else ": its plan cannot be read, so its role has no name here"
        raise UsageError(f"{job_id} has no role {wanted.role}{there}")
    who = job_id if wanted.role is None else f"role {wanted.role} of {job_id}"
    chosen = [group for group in groups if wanted.role in (None, group.role)]
    nodes = {group.node for group in chosen}
    if wanted.node is not None and wanted.node not in nodes:
        there = "it runs on one node, which is node 0" if nodes == {0} else f"it runs on {_spans(nodes)}"
        raise UsageError(f"{who} has no node {wanted.node}: {there}")
    who += "" if wanted.node is None else f" on node {wanted.node}"
    chosen = [group for group in chosen if wanted.node in (None, group.node)]
    ranks = {rank for group in chosen for rank in group.ranks}
    if wanted.attempt is not None and wanted.rank is not None and len(chosen) == 1:
        return [chosen[0]._replace(ranks=(wanted.rank,))]  # that attempt may have had more ranks than the last one
    if wanted.rank is not None and wanted.rank not in ranks:
        raise UsageError(f"{who} has no rank {wanted.rank}" + (f", only {_spans(ranks)}" if ranks else " yet"))
    if wanted.rank is not None:
        chosen = [group._replace(ranks=(wanted.rank,)) for group in chosen if wanted.rank in group.ranks]
    count = sum(len(group.ranks) for group in chosen)
    if wanted.raw and count != 1:
        raise UsageError(f"--raw gives the bytes of one rank, and {who} has {count}", hint=_one_of(chosen))
    return chosen


def _one_of(chosen: Sequence[Processes]) -> str:
    if len(chosen) == 1:
        return f"add --rank R, {_spans(chosen[0].ranks)}"
    there = [f"{group.role} node {group.node} rank {_spans(group.ranks)}".lstrip() for group in chosen if group.ranks]
    return f"add --role, --node or --rank: {', '.join(there)}"


def _spans(numbers: Iterable[int]) -> str:
    """`0 to 3, 8 to 11`."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in spans)


def _request(wanted: LogsRequest, chosen: Sequence[Processes], *, live: bool) -> dict[str, Any]:
    part = {"tail": wanted.tail, "since": wanted.since, "grep": wanted.grep, "attempt": wanted.attempt, "live": live}
    role, node = (chosen[0].role, chosen[0].node) if len(chosen) == 1 else (wanted.role, wanted.node)
    rank = chosen[0].ranks[0] if wanted.raw else wanted.rank
    return {**part, "role": role, "node": node, "ranks": None if rank is None else [rank]}
