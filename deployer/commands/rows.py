"""Jobs as rows of a table: the columns, and which of them are dropped on a narrow terminal; also rows as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from deployer import terminal
from deployer.agent.host.typed import to_json
from deployer.agent.job.status import FAILED, FINAL, LOST, PREPARING, QUEUED, RUNNING, STOPPED, SUCCEEDED, State
from deployer.agent.job.views import Row
from deployer.commands.in_words import UNREACHABLE, age_of, since, state_of
from deployer.jobs.registry import SeenJob
from deployer.printable import Shown, cells, shown

NONE = "-"
GAP = 2
"""Blanks between two columns."""
WIDE_COMMAND, NARROW_COMMAND = 40, 12
COMMAND = "COMMAND"
MOST_LEFT_S = 1e9
"""Seconds; an estimate of more than this is not shown."""


class _Column(NamedTuple):
    title: str
    cell: Callable[[SeenJob], str]
    goes: int = 0
    """Order in which columns are dropped if there is no room, lowest number first; 0: never dropped."""


def columns_of(rows: Sequence[SeenJob], room: int | None) -> tuple[list[Shown], list[tuple[Shown, ...]]]:
    """The titles and the cells of the rows for a terminal with `room` columns; None: all columns."""
    written = [[shown(column.cell(row)) for row in rows] for column in COLUMNS]
    widths = [max(len(column.title), *map(len, texts), 0) for column, texts in zip(COLUMNS, written, strict=True)]
    command = next(number for number, column in enumerate(COLUMNS) if column.title == COMMAND)
    widths[command] = min(widths[command], WIDE_COMMAND)
    if room is not None and _total(widths) > room:
        widths[command] = max(min(widths[command], NARROW_COMMAND), widths[command] - _total(widths) + room)
    kept = list(range(len(COLUMNS)))
    droppable = [number for number in kept if COLUMNS[number].goes]
    # empty columns are dropped before any other
    for number in sorted(droppable, key=lambda n: (set(written[n]) - {NONE} != set(), COLUMNS[n].goes)):
        if room is None or _total([widths[n] for n in kept]) <= room:
            break
        kept.remove(number)
    written[command] = [_cut(text, widths[command]) for text in written[command]]
    titles = [shown(COLUMNS[number].title) for number in kept]
    return titles, [cells(*(written[number][row] for number in kept)) for row in range(len(rows))]


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + GAP * (len(widths) - 1)


def _cut(text: Shown, most: int) -> Shown:
    return text if len(text) <= most else shown(text[: most - 1] + "…")


def in_order(rows: Sequence[SeenJob]) -> list[SeenJob]:
    """Running jobs first, then waiting ones, then ended ones; the newest first in each group."""

    def place(row: SeenJob) -> int:
        return 0 if row.job.state == RUNNING else 2 if row.job.state in FINAL and row.seen_at is not None else 1

    newest = sorted(rows, key=lambda row: (row.job.created, row.job.id), reverse=True)
    return sorted(newest, key=place)


_STYLES = {
    RUNNING: "green",
    QUEUED: "yellow",
    PREPARING: "cyan",
    SUCCEEDED: "dim",
    FAILED: "red",
    LOST: "red",
    STOPPED: "dim",
}


def style_of(row: SeenJob) -> str:
    """The style of a row, from the state of its job."""
    return "magenta" if row.trouble else style_of_state(row.job.state)


def style_of_state(state: State) -> str:
    return _STYLES[state]


def seconds_left(job: Row) -> float | None:
    """Seconds until the last step, at the recent speed; None if the job does not run, or if this is unknown."""
    if job.state != RUNNING or job.step is None or job.steps is None or job.step_s is None or job.step > job.steps:
        return None
    left_s = (job.steps - job.step) * job.step_s
    return left_s if left_s < MOST_LEFT_S else None


NULL_AT_FIRST = "reason", "on_host", "attempt", "max_attempts", "damaged", "command"
"""Keys that are null in the JSON while they have no value."""


def row_as_json(row: SeenJob) -> dict[str, Any]:
    job = to_json(row.job)
    told = {**job, **{name: job[name] or None for name in NULL_AT_FIRST}, "where": row.where, "seen_at": row.seen_at}
    told["left_s"] = seconds_left(row.job)
    if not row.trouble:
        return told
    last_state = row.job.state if row.seen_at is not None else None
    return {**told, "state": UNREACHABLE, "last_state": last_state, "reason": row.trouble}


# --- the cells --------------------------------------------------------------------------------------------------------


def duration(seconds: float) -> str:
    """`42s`, `7m05s`, `3h20m`, `2d04h`."""
    whole = max(0, round(seconds))
    for unit, length, lower, part in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if whole >= length:
            return f"{whole // length}{unit}{whole % length // part:02d}{lower}"
    return f"{whole}s"


def _what(row: SeenJob) -> str:
    return row.job.command or row.job.name or NONE


def _gpus(row: SeenJob) -> str:
    names = ",".join(row.job.gpus)
    return (names if len(names) <= 15 else terminal.counted(len(row.job.gpus), "GPU")) or NONE


def _step(row: SeenJob) -> str:
    job = row.job
    return NONE if job.step is None else f"{job.step}" if job.steps is None else f"{job.step}/{job.steps}"


def _loss(row: SeenJob) -> str:
    return NONE if row.job.loss is None else f"{row.job.loss:.4g}"


def _elapsed(row: SeenJob) -> str:
    """How long the job has run, including the time since it was last seen; before its start, the time since launch."""
    job = row.job
    if job.ran_s is None:
        return age_of(row) if job.state not in FINAL else NONE
    more_s = (since(row.seen_at) or 0) if job.state not in FINAL else 0
    return duration(job.ran_s + more_s)


def _left(row: SeenJob) -> str:
    left_s = None if row.trouble else seconds_left(row.job)
    return NONE if left_s is None else duration(left_s)


COLUMNS = (
    _Column("ID", lambda row: row.job.id),
    _Column("STATE", state_of),
    _Column(COMMAND, _what, 1),
    _Column("GPUS", _gpus, 2),
    _Column("STEP", _step, 7),
    _Column("LOSS", _loss, 5),
    _Column("ELAPSED", _elapsed, 4),
    _Column("ETA", _left, 6),
    _Column("WHERE", lambda row: row.where, 3),
)
