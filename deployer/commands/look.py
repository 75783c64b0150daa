"""`ps`, `status`, `logs` and `doctor`."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

import click

from deployer import jobs, render
from deployer.agent.state import FINAL
from deployer.commands.screen import DETACHED, Screen, exit_code_of, log_view, next_commands
from deployer.errors import LostConnection, UsageError
from deployer.host import Host
from deployer.launch import follow_to_end
from deployer.registry import JobRecord, read_records

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
    rows = [("state", _state_line(found)), ("where", host.name), ("folder", found.get("path"))]
    rows += [(key, found[key]) for key in ("started_at", "ended_at", "reason") if found.get(key)]
    rows += _metrics_rows(found.get("latest"))
    render.table((found["job_id"], ""), rows)
    next_commands(found["job_id"], found if found["state"] in FINAL else None)


def _state_line(found: dict[str, Any]) -> str:
    code = found.get("code")
    return f"{found['state']} (exit code {code})" if found["state"] == "failed" else str(found["state"])


def _metrics_rows(latest: str | None) -> list[tuple[str, str]]:
    try:
        metrics = json.loads(latest or "{}")
    except ValueError:
        return []
    return [(f"last {key}", render.number(value)) for key, value in metrics.items() if value is not None][:10]


def logs(host: Host, job_id: str, *, follow: bool | None, tail: int | None, rank: int | None, launcher: bool) -> int:
    """Shows a log; follows it while the job runs unless `follow` says otherwise. Returns the exit code."""
    if launcher and rank is not None:
        raise UsageError("give --launcher or --rank, not both")
    found = jobs.read_status(host, job_id)
    live = follow if follow is not None else found["state"] not in FINAL
    nproc = int(found.get("nproc") or 1)
    if rank is not None and rank >= nproc:
        raise UsageError(f"{found['job_id']} has no rank {rank}, only 0 to {nproc - 1}")
    ranks = None if rank is None else [rank]
    one_rank = rank is not None or nproc == 1
    view = log_view(raw=one_rank, launcher=launcher)
    request = {"tail": tail, "ranks": ranks, "live": live}
    screen = Screen(JobRecord(found["job_id"], "", host.ssh, host.root, "", "", host.ssh_key))
    screen.folder = found["path"]
    try:
        final = follow_to_end(host.connect, found["job_id"], view=view, watcher=screen, request=request)
    except KeyboardInterrupt:
        render.notice("\nthe job runs on")
        return DETACHED
    except LostConnection as error:
        render.show_error(error)
        next_commands(found["job_id"])
        return DETACHED
    if not live:
        return 0
    render.notice(f"{found['job_id']} {_state_line(final)}")
    return exit_code_of(final)


def doctor(host: Host, *, as_json: bool) -> int:
    """Shows a host's checks; 0 when none fails, 1 otherwise."""
    begun = time.monotonic()
    with host.connect(request={"op": "doctor", "client_time": time.time()}) as link:
        found = link.first.result("doctor")
    took_s = time.monotonic() - begun
    found["checks"].append(
        {"name": "connection", "status": "ok", "detail": f"{took_s:.2f} s for all of this, one connection", "hint": ""}
    )
    if as_json:
        click.echo(json.dumps(found, indent=1))
    else:
        render.table((host.name, ""), [(key, _fact(value)) for key, value in found["facts"].items()])
        render.checks(found["checks"])
    return 1 if any(check["status"] == "fail" for check in found["checks"]) else 0


def _fact(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k}={v}" for k, v in value.items()) or "-"
    if isinstance(value, list):
        return "; ".join(_fact(v) for v in value) or "-"
    return str(value)
