"""`status`: the current status of one job on its host, or its last known state."""

from __future__ import annotations

import time
from typing import Any

from deployer import terminal
from deployer.agent.gpus.queue import queue_line
from deployer.agent.host.typed import InvalidData, from_json, load_json, to_json
from deployer.agent.job.status import FINAL, status_to_json
from deployer.agent.job.views import JobView
from deployer.commands.in_words import attempt_line, live_state, silence_line, stall_lines, state_line, state_of
from deployer.commands.rows import row_as_json
from deployer.commands.screen import last_words, missed_lines, next_commands, next_lines
from deployer.connection.host import Host
from deployer.error_json import error_as_json
from deployer.errors import ConnectError, FerryError, LostConnection
from deployer.jobs.registry import recall_rows
from deployer.jobs.requests import read_status
from deployer.jobs.roster import unreachable
from deployer.printable import cells, shown

NULL_AT_FIRST = "job", "attempt", "first_attempt", "max_attempts", "cwd", "reason", "on_host", "damaged", "stalled"
"""Keys that are null in `status --json` while they have no value."""


def status(host: Host, job_id: str, *, as_json: bool) -> None:
    try:
        found = read_status(host, job_id)
    except (ConnectError, LostConnection) as error:
        _show_last_seen(host, job_id, error, as_json=as_json)
        raise
    if as_json:
        terminal.say_json(status_as_json(found, host))
        return
    job = found.status
    state = state_line(job) if job.state in FINAL else live_state(job)
    rows: list[tuple[str, object]] = [("state", state), ("where", host.name), ("folder", found.path)]
    told = (("started_at", job.started_at), ("ended_at", job.ended_at), ("reason", job.reason))
    rows += [(name, text) for name, text in told if text]
    rows += [("cause", cause) for cause in (*job.causes, *missed_lines(found.job_id, job, host))]
    rows += [("hint", job.hint)] if job.hint else []
    rows += [("warning", warning) for warning in job.warnings]
    rows += [("attempt", line.removeprefix("attempt ")) for line in [attempt_line(job)] if line]
    rows += [("silent", line) for line in [silence_line(found)] if line]
    rows += [("stalled", line) for line in stall_lines(job)]
    if job.queue is not None:
        rows.append(("queue", queue_line(job.queue, time.time())))
    rows += _metrics_rows(found.latest)
    terminal.facts(shown(found.job_id), [cells(*row) for row in rows])
    next_commands(found.job_id, job if job.state in FINAL else None, without="status")


def status_as_json(view: JobView, host: Host) -> dict[str, Any]:
    """The status for a script: one level, like status.json, with the facts about a failure that people see."""
    job_id, final = view.job_id, view.status
    ended = final if final.state in FINAL else None
    return {
        **_as_json(view),
        "id": job_id,
        "where": host.name,
        "folder": view.path,
        "hint": final.hint or None,
        "missed": missed_lines(job_id, final, host),
        "last_lines": last_words(job_id, final, host),
        "next": [line.split() for line in next_lines(job_id, ended)],
    }


def _as_json(view: JobView) -> dict[str, Any]:
    rest = {name: to_json(value) for name, value in view._asdict().items() if name != "status"}
    flat = {**status_to_json(view.status), **rest}
    return {**flat, **{name: flat.get(name) or None for name in NULL_AT_FIRST}}


def _show_last_seen(host: Host, job_id: str, error: FerryError, *, as_json: bool) -> None:
    seen = next((row for row in recall_rows(host.ssh, host.root) if row.job.id == job_id), None)
    if seen is None:
        return
    row = unreachable(seen, error)
    if as_json:
        terminal.say_json({**row_as_json(row), "error": error_as_json(error)})
        error.is_in_json = True
    else:
        rows = [cells("state", state_of(row)), cells("where", host.name), cells("seen", row.seen_at)]
        terminal.facts(shown(job_id), rows)


def _metrics_rows(latest: str | None) -> list[tuple[str, str]]:
    try:
        metrics = from_json(load_json((latest or "{}").encode("utf-8", "surrogatepass")), dict[str, Any])
    except InvalidData:
        return []
    return [(f"last {key}", terminal.number(value)) for key, value in metrics.items() if value is not None][:10]
