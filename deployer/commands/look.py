"""`ps` and `status`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

import click

from deployer import jobs, render
from deployer.agent.state import FINAL
from deployer.attempts import attempt_line, silence_line
from deployer.commands.screen import next_commands, state_line
from deployer.host import Host
from deployer.registry import read_records

SHOWN_ENDED = 20


def ps(hosts: Sequence[Host], *, show_all: bool, as_json: bool) -> None:
    rows = jobs.list_jobs(hosts, read_records())
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    if not show_all:
        ended = [row for row in rows if row["state"] in FINAL]
        rows = [row for row in rows if row not in ended[:-SHOWN_ENDED]]
    if not rows:
        render.notice("no jobs")
        return
    render.table(("ID", "STATE", "GPUS", "AGE", "WHERE"), [_row(row) for row in rows])


def _row(row: dict[str, Any]) -> tuple[object, ...]:
    more = {"failed": row.get("code"), "unreachable": row.get("reason")}.get(row["state"])
    state = row["state"] if more is None else f"{row['state']}({more})"
    gpus = ",".join(row.get("gpus") or []) or "-"
    return row["id"], state, gpus, _age(row.get("created")), row["where"]


def _age(created: object) -> str:
    try:
        then = datetime.fromisoformat(str(created).replace("Z", "+00:00"))
    except ValueError:
        return "?"
    return render.age((datetime.now(timezone.utc) - then).total_seconds())


def status(host: Host, job_id: str, *, as_json: bool) -> None:
    found = jobs.read_status(host, job_id)
    if as_json:
        click.echo(json.dumps(found, indent=1))
        return
    rows = [("state", state_line(found)), ("where", host.name), ("folder", found.get("path"))]
    rows += [(key, found[key]) for key in ("started_at", "ended_at", "reason") if found.get(key)]
    rows += [("warning", warning) for warning in found.get("warnings") or []]
    rows += [("attempt", line) for line in [attempt_line(found)] if line]
    rows += [("silent", line) for line in [silence_line(found)] if line]
    rows += _metrics_rows(found.get("latest"))
    render.table((found["job_id"], ""), rows)
    next_commands(found["job_id"], found if found["state"] in FINAL else None)


def _metrics_rows(latest: str | None) -> list[tuple[str, str]]:
    try:
        metrics = json.loads(latest or "{}")
    except ValueError:
        return []
    return [(f"last {key}", render.number(value)) for key, value in metrics.items() if value is not None][:10]
