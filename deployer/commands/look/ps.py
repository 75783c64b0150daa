"""`ps`: the jobs of all hosts in one table, once or again and again."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from deployer import terminal
from deployer.agent.host.typed import to_json
from deployer.agent.job.status import FINAL
from deployer.commands.in_words import UNREACHABLE, age_of, state_of
from deployer.connection.host import Host
from deployer.errors import FerryError, UsageError
from deployer.jobs.registry import SeenJob, note_damage, read_records
from deployer.jobs.roster import Asker, ask_all, rows_of
from deployer.printable import Shown, cells, shown

SHOWN_ENDED = 20
COLUMNS = cells("ID", "STATE", "GPUS", "STEP", "AGE", "WHERE")


def ps(hosts: Sequence[Host], *, show_all: bool, as_json: bool) -> None:
    answers = ask_all(hosts)
    rows = rows_of(hosts, answers, read_records())
    if as_json:
        terminal.say_json([row_as_json(row) for row in rows])
        return
    rows = rows if show_all else without_old(rows)
    if rows:
        terminal.table(COLUMNS, [_cells(row) for row in rows])
    for host, answer in zip(hosts, answers, strict=True):
        if isinstance(answer, FerryError):
            terminal.notice(shown(f"{host.name} cannot be asked: {answer.message}"))
            if damage := note_damage(host.ssh, host.root):
                terminal.notice(shown(f"what {host.name} said last is not known: {damage}"))
    said = {answer.message for answer in answers if isinstance(answer, FerryError)}
    terminal.notice(*(shown(f"{row.job.id}: {row.trouble}") for row in rows if row.trouble and row.trouble not in said))
    if not rows:
        terminal.notice(shown("no jobs"))


def without_old(rows: Sequence[SeenJob]) -> list[SeenJob]:
    """Without all but the last ended ones."""
    ended = [row for row in rows if row.job.state in FINAL and not row.trouble]
    return [row for row in rows if row not in ended[:-SHOWN_ENDED]]


NULL_AT_FIRST = "reason", "on_host", "attempt", "max_attempts", "damaged"
"""What a script reads as null while there is nothing to say."""


def row_as_json(row: SeenJob) -> dict[str, Any]:
    """For a script."""
    job = to_json(row.job)
    told = {**job, **{name: job[name] or None for name in NULL_AT_FIRST}, "where": row.where, "seen_at": row.seen_at}
    if not row.trouble:
        return told
    last_state = row.job.state if row.seen_at is not None else None
    return {**told, "state": UNREACHABLE, "last_state": last_state, "reason": row.trouble}


def watch(hosts: Sequence[Host], *, show_all: bool, every_s: float) -> None:
    """The table of `ps`, drawn anew every `every_s` seconds until it is interrupted. A host that is slow or gone keeps
    no other one waiting."""
    if not sys.stdout.isatty():
        raise UsageError("ps --watch draws on a terminal, and stdout is none", hint="deploy.py ps --json for a script")
    askers = [Asker(host) for host in hosts]
    records = read_records()
    try:
        with terminal.live_table(COLUMNS) as draw:
            while True:
                for asker in askers:
                    asker.ask()
                deadline = time.monotonic() + every_s
                answers = [asker.wait(max(0.0, deadline - time.monotonic())) for asker in askers]
                rows = rows_of(hosts, answers, records)
                draw([_cells(row) for row in (rows if show_all else without_old(rows))])
                time.sleep(max(0.0, deadline - time.monotonic()))
    except KeyboardInterrupt:
        pass
    finally:
        for asker in askers:
            asker.close()


def _cells(row: SeenJob) -> tuple[Shown, ...]:
    job = row.job
    step = "-" if job.step is None else job.step
    return cells(job.id, state_of(row), ",".join(job.gpus) or "-", step, age_of(row), row.where)
