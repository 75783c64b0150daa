"""`ps`: the jobs of all hosts in one table, once or repeatedly."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from deployer import terminal
from deployer.agent.job.status import FINAL
from deployer.commands.rows import columns_of, in_order, row_as_json, style_of
from deployer.connection.host import Host
from deployer.errors import FerryError, UsageError
from deployer.jobs.registry import SeenJob, note_damage, read_records
from deployer.jobs.roster import Asker, ask_all, rows_of
from deployer.printable import shown

SHOWN_ENDED = 20


def ps(hosts: Sequence[Host], *, show_all: bool, as_json: bool) -> None:
    """Shows the jobs. Raises the first host's error if no host answered and no job is known: that is not "no jobs"."""
    answers = ask_all(hosts)
    rows = rows_of(hosts, answers, read_records())
    failed = [answer for answer in answers if isinstance(answer, FerryError)]
    if failed and not rows and len(failed) == len(answers):
        raise failed[0]
    if as_json:
        terminal.say_json([row_as_json(row) for row in rows])
    else:
        rows = in_order(rows if show_all else without_old(rows))
        if rows:
            terminal.table(*columns_of(rows, terminal.width()), [*map(style_of, rows)])
    for host, answer in zip(hosts, answers, strict=True):
        if isinstance(answer, FerryError):
            terminal.notice(shown(f"{host.name} cannot be asked: {answer.message}"))
            if damage := note_damage(host.ssh, host.root):
                terminal.notice(shown(f"what {host.name} said last is not known: {damage}"))
    said = {answer.message for answer in answers if isinstance(answer, FerryError)}
    terminal.notice(*(shown(f"{row.job.id}: {row.trouble}") for row in rows if row.trouble and row.trouble not in said))
    if not rows and not failed and not as_json:
        terminal.notice(shown("no jobs"))


def without_old(rows: Sequence[SeenJob]) -> list[SeenJob]:
    """The rows without ended jobs, except the last SHOWN_ENDED of them."""
    ended = [row for row in rows if row.job.state in FINAL and not row.trouble]
    return [row for row in rows if row not in ended[:-SHOWN_ENDED]]


def watch(hosts: Sequence[Host], *, show_all: bool, every_s: float) -> None:
    """Draws the table of `ps` again every `every_s` seconds until Ctrl-C. A host that is slow or gone does not delay
    the others."""
    if not sys.stdout.isatty():
        raise UsageError("ps --watch draws on a terminal, and stdout is none", hint="deploy.py ps --json for a script")
    askers = [Asker(host) for host in hosts]
    records = read_records()
    try:
        with terminal.live_table() as draw:
            while True:
                for asker in askers:
                    asker.ask()
                deadline = time.monotonic() + every_s
                answers = [asker.wait(max(0.0, deadline - time.monotonic())) for asker in askers]
                rows = rows_of(hosts, answers, records)
                rows = in_order(rows if show_all else without_old(rows))
                draw(*columns_of(rows, terminal.width()), [*map(style_of, rows)])
                time.sleep(max(0.0, deadline - time.monotonic()))
    except KeyboardInterrupt:
        pass
    finally:
        for asker in askers:
            asker.close()
