"""`status`: one job as its host judges it, or as it was last seen."""

from __future__ import annotations

import json
import time

from deployer import terminal
from deployer.agent.gpus.queue import queue_line
from deployer.agent.job.status import FINAL
from deployer.commands.in_words import attempt_line, silence_line, stall_lines, state_line, state_of
from deployer.commands.screen import next_commands
from deployer.connection.host import Host
from deployer.errors import ConnectError, FerryError, LostConnection
from deployer.jobs.registry import recall_rows
from deployer.jobs.requests import read_status
from deployer.jobs.roster import unreachable
from deployer.printable import cells, shown


def status(host: Host, job_id: str, *, as_json: bool) -> None:
    try:
        found = read_status(host, job_id)
    except (ConnectError, LostConnection) as error:
        _show_last_seen(host, job_id, error, as_json=as_json)
        raise
    if as_json:
        terminal.say_json(found)
        return
    state = state_line(found) if found["state"] in FINAL else state_of(found)
    rows: list[tuple[str, object]] = [("state", state), ("where", host.name), ("folder", found.get("path"))]
    rows += [(key, found[key]) for key in ("started_at", "ended_at", "reason") if found.get(key)]
    rows += [("warning", warning) for warning in found.get("warnings") or []]
    rows += [("attempt", line) for line in [attempt_line(found)] if line]
    rows += [("silent", line) for line in [silence_line(found)] if line]
    rows += [("stalled", line) for line in stall_lines(found)]
    if found.get("queue"):
        rows.append(("queue", queue_line(found["queue"], time.time())))
    rows += _metrics_rows(found.get("latest"))
    terminal.facts(shown(found["job_id"]), [cells(*row) for row in rows])
    next_commands(found["job_id"], found if found["state"] in FINAL else None, without="status")


def _show_last_seen(host: Host, job_id: str, error: FerryError, *, as_json: bool) -> None:
    seen = [row for row in recall_rows(host.ssh, host.root) if row["id"] == job_id]
    if not seen:
        return
    row = unreachable(seen[0], error)
    if as_json:
        terminal.say_json(row)
    else:
        rows = [cells("state", state_of(row)), cells("where", host.name), cells("seen", row["seen_at"])]
        terminal.facts(shown(job_id), rows)


def _metrics_rows(latest: str | None) -> list[tuple[str, str]]:
    try:
        metrics = json.loads(latest or "{}")
    except ValueError:
        return []
    return [(f"last {key}", terminal.number(value)) for key, value in metrics.items() if value is not None][:10]
