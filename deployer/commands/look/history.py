"""`history`: the jobs that this client has launched, newest first. No host is asked."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

from deployer import terminal
from deployer.agent.host.typed import to_json
from deployer.connection.host import HERE
from deployer.jobs.registry import JobRecord, SeenJob, read_records, recall_rows
from deployer.printable import Shown, cells, shown

NEVER_SEEN = "not known"


def history(*, last: int, as_json: bool) -> None:
    damages: list[str] = []
    records = read_records(damages.append)[::-1]
    shown_ones = records[:last] if last else records
    rows = _rows_of(shown_ones)
    if as_json:
        terminal.say_json([_as_json(record, rows.get(record.job_id)) for record in shown_ones])
    elif shown_ones:
        columns = cells("WHEN", "ID", "HOST", "LAST STATE", "COMMAND")
        terminal.table(columns, [_cells(record, rows.get(record.job_id)) for record in shown_ones])
    terminal.notice(*map(shown, damages))
    if not records and not as_json:
        terminal.notice(shown("nothing was launched from this machine"))
    elif len(records) > len(shown_ones) and not as_json:
        terminal.notice(shown(f"{len(records) - len(shown_ones)} older ones: {terminal.invoked_as()} history --last 0"))


def _rows_of(records: Sequence[JobRecord]) -> dict[str, SeenJob]:
    """The last state that each job's host reported."""
    places = dict.fromkeys((record.ssh, record.root) for record in records)
    return {row.job.id: row for place in places for row in recall_rows(*place) if row.seen_at is not None}


def command_of(record: JobRecord) -> str:
    """The command line as it was typed, without values of variables; empty if it was not stored."""
    return shlex.join([record.verb, *record.words]) if record.words else ""


def _cells(record: JobRecord, row: SeenJob | None) -> tuple[Shown, ...]:
    state = row.job.state if row is not None else NEVER_SEEN
    if row is not None and row.job.code:
        state = f"{state} ({row.job.code})"
    return cells(_local_time(record.created), record.job_id, record.ssh or HERE, state, command_of(record) or "-")


def _local_time(created: str) -> str:
    """The time for people, in this machine's time zone."""
    try:
        moment = datetime.strptime(created, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc)
    except ValueError:
        return created[:19]
    return f"{moment.astimezone():%Y-%m-%d %H:%M}"


def _as_json(record: JobRecord, row: SeenJob | None) -> dict[str, Any]:
    kept = to_json(record)
    return {
        "id": record.job_id,
        **{name: kept[name] for name in ("name", "created", "ssh", "root", "results", "folder", "words")},
        "command": command_of(record) or None,
        "last_state": row.job.state if row is not None else None,
        "code": row.job.code if row is not None else None,
        "seen_at": row.seen_at if row is not None else None,
    }
