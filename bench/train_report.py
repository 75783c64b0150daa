"""Rows of bench/train.py as JSON, as tables, and against a baseline. Pure, except reading and writing files."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from train_cases import PEAK_FLOPS, Contender, flops_per_token, work_of

Row = dict[str, Any]
Report = dict[str, Any]
"""`meta` (card, versions, date, command) and `rows`."""
NAMES = {
    "ours": "Torchferry", "titan": "torchtitan 0.2.2", "raw": "plain torch", "hf": "HF Trainer",
    "liger": "HF Trainer + Liger", "trl": "TRL",
}  # fmt: skip
SLOWER = 0.05
"""The fraction by which a row of ours may be slower than the baseline's."""
ENOUGH = 3
"""Runs that a row needs for README's table."""
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
NO_TIME = "no time was left"


def make_row(contender: Contender, measured: Row) -> Row:
    """A contender's row: median step, tokens per second and GPU, MFU, peak memory; or why it failed."""
    row: Row = {
        "key": contender.key, "who": contender.who, "model": contender.model, "gpus": contender.gpus,
        "seq_len": contender.seq_len, "micro_batch": contender.micro_batch, "packed": contender.packed,
        "label": contender.label, "options": contender.options,
    }  # fmt: skip
    if "failed" in measured:
        return {**row, "failed": measured["failed"]}
    median_s = statistics.median(measured["step_s"])
    # only tokens that are trained on: a packed row has some padding at its end
    tokens = measured.get("tokens") or contender.gpus * contender.micro_batch * contender.seq_len
    speed = tokens / contender.gpus / median_s
    return {
        **row,
        "step_ms": round(1e3 * median_s, 1),
        "step_ms_min": round(1e3 * min(measured["step_s"]), 1),
        "step_ms_max": round(1e3 * max(measured["step_s"]), 1),
        "tok_s_gpu": round(speed),
        "mfu": _mfu(contender, speed, measured.get("mfu")),
        "peak_gib": round(measured["peak_gib"], 1),
        **{name: measured.get(name) for name in ("first_step_s", "data_wait_s", "loss") if name in measured},
        **({"notes": measured["notes"]} if measured.get("notes") else {}),
    }


def of_runs(rows: Sequence[Row]) -> Row:
    """One row for all runs of a contender: the medians, the range of its speed, and each run's speed as `runs`.

    Failed runs are left out and counted. If all failed, this is the first one's row.
    """
    rows = [row for row in rows if row.get("failed") != NO_TIME] or rows
    measured = _measured(rows)
    if len(rows) == 1 or not measured:
        return rows[0]
    named = [row["tok_s_gpu"] for row in measured]
    middle = {
        name: statistics.median(row[name] for row in measured)
        for name in ("step_ms", "tok_s_gpu", "mfu", "first_step_s")
        if all(row.get(name) is not None for row in measured)
    }
    return {
        **measured[-1],
        **middle,
        "step_ms_min": min(row["step_ms_min"] for row in measured),
        "step_ms_max": max(row["step_ms_max"] for row in measured),
        "peak_gib": max(row["peak_gib"] for row in measured),
        "runs": named,
        **({"failed_runs": len(rows) - len(measured)} if len(rows) > len(measured) else {}),
    }


def _mfu(contender: Contender, speed: float, told: float | None) -> float | None:
    """MFU by one formula for all, for full rows and full training; otherwise the contender's own figure, if it has
    one."""
    if contender.packed or work_of(contender.options):
        return None if told is None else round(told, 4)
    return round(flops_per_token(contender.model, contender.seq_len) * speed / PEAK_FLOPS, 4)


def add_row(rows: Sequence[Row], row: Row) -> list[Row]:
    """The rows with this one, in place of an earlier row with its key. A row for which no time was left replaces
    none."""
    if row["key"] not in [known["key"] for known in rows]:
        return [*rows, row]
    if row.get("failed") == NO_TIME:
        return list(rows)
    return [row if known["key"] == row["key"] else known for known in rows]


# --- tables -----------------------------------------------------------------------------------------------------------


def render(rows: Sequence[Row]) -> list[str]:
    """A markdown table: peers compared with ours at the same work, ours with an option compared with ours without
    it."""
    lines = [
        "| | model | GPUs | rows | micro-batch | step ms (min-max) | tok/s/GPU | MFU | peak GiB | start s | ratio |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    return lines + [_line(row, rows) for row in rows]


def _line(row: Row, rows: Sequence[Row]) -> str:
    name = NAMES[row["who"]] + (f", {row['label']}" if row["label"] else "")
    where = f"| {name} | {row['model']} | {row['gpus']} | {_rows_text(row)} | {row['micro_batch']} |"
    if "failed" in row:
        return f"{where} {row['failed'].replace('|', '/')[:80]} | | | | | |"
    mfu = f"{row['mfu']:.1%}" if row["mfu"] else ""
    first = f"{row['first_step_s']:.0f}" if row.get("first_step_s") else ""
    step = f"{row['step_ms']:.0f} ({row['step_ms_min']:.0f}-{row['step_ms_max']:.0f})"
    ratio = _ratio_of_ours(row, rows) if row["who"] == "ours" else _ratio_to_peer(row, rows)
    return f"{where} {step} | {_speed_text(row)} | {mfu} | {row['peak_gib']:.1f} | {first} | {ratio} |"


def _speed_text(row: Row) -> str:
    """Tokens per second and GPU; with several runs also the slowest and the fastest."""
    runs = row.get("runs", [])
    return f"{row['tok_s_gpu']:,.0f}" + (f" ({min(runs):,}–{max(runs):,})" if len(runs) > 1 else "")


def _rows_text(row: Row) -> str:
    return f"{row['seq_len']}, " + ("packed documents" if row["packed"] else "full")


def _ratio_to_peer(row: Row, rows: Sequence[Row]) -> str:
    """Our speed divided by the peer's: at its micro-batch, and at our best."""
    mine = [r for r in _measured(rows) if r["who"] == "ours" and work_key(r) == work_key(row)]
    same = [r["tok_s_gpu"] for r in mine if r["micro_batch"] == row["micro_batch"]]
    best = [r["tok_s_gpu"] for r in mine]
    parts = [f"ours is {max(same) / row['tok_s_gpu']:.2f} x"] if same else []
    if best and (not same or max(best) > max(same)):
        parts.append(f"ours at its best {max(best) / row['tok_s_gpu']:.2f} x")
    return ", ".join(parts)


def _ratio_of_ours(row: Row, rows: Sequence[Row]) -> str:
    """The speed of packed rows divided by that of full rows, or with an option divided by that without."""
    full = not row["packed"] or bool(row["label"])
    plain = [
        r["tok_s_gpu"] for r in _measured(rows)
        if r["who"] == "ours" and not r["label"] and r["packed"] == (row["packed"] and full)
        and all(r[name] == row[name] for name in ("model", "gpus", "seq_len", "micro_batch")) and r is not row
    ]  # fmt: skip
    return f"{row['tok_s_gpu'] / plain[0]:.2f} x {'without' if full else 'full rows'}" if plain else ""


def work_key(row: Row) -> tuple[Any, ...]:
    """The key of the work in a row. Rows with the same key did the same work; micro-batch and settings may differ."""
    return (row["model"], row["gpus"], row["seq_len"], row["packed"], work_of(row["options"]))


def _measured(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if "failed" not in row]


def render_readme(reports: Sequence[Report]) -> list[str]:
    """The short table: for each work, every contender's fastest row, and the ratio of our speed to it, at its
    micro-batch, or at our best one if we have no row at that. Rows with fewer than three runs are left out. If several
    reports have the same work on the same card, the last one counts. Without reports, the table is empty."""
    newest = {(card, work_key(rows[0])): (rows, card) for report in reports for rows, card in _works(report)}
    names = [who for who in NAMES if any(row["who"] == who for rows, _ in newest.values() for row in rows)]
    lines = [_readme_line(*found, names) for found in newest.values()]
    head = [f"| model, GPUs, rows | {' | '.join(NAMES[who] for who in names)} |", "|---" * (len(names) + 1) + "|"]
    return head + lines if lines else []


def _works(report: Report) -> Iterator[tuple[list[Row], str]]:
    """The rows of each work that a peer did too, without rows that had too few runs."""
    rows = [row for row in _measured(report["rows"]) if len(row.get("runs", [])) >= ENOUGH]
    for key in dict.fromkeys(map(work_key, rows)):
        found = [row for row in rows if work_key(row) == key]
        if {row["who"] for row in found} > {"ours"}:
            yield found, report["meta"]["card"]


def _readme_line(rows: Sequence[Row], card: str, names: Sequence[str]) -> str:
    work = work_of(rows[0]["options"])
    title = f"{rows[0]['model']}{f' {work}' if work else ''}, {rows[0]['gpus']} x {card}, {_rows_text(rows[0])}"
    return "| " + " | ".join([title, *(_readme_cell(who, rows) for who in names)]) + " |"


def _readme_cell(who: str, rows: Sequence[Row]) -> str:
    best = max((row for row in rows if row["who"] == who), key=lambda row: row["tok_s_gpu"], default=None)
    if best is None:
        return ""
    mine = [row for row in rows if row["who"] == "ours"]
    if who == "ours" or not mine:
        return _speed_text(best)
    same = [row for row in mine if row["micro_batch"] == best["micro_batch"]] or mine
    return f"{_speed_text(best)}, {max(row['tok_s_gpu'] for row in same) / best['tok_s_gpu']:.2f} x"


# --- against a baseline -----------------------------------------------------------------------------------------------


def judge(report: Report, baseline: Report) -> tuple[list[str], int]:
    """A table of our rows against an earlier report, and the exit code: 0 as fast, 1 slower, 2 not comparable."""
    here, there = report["meta"]["card"], baseline["meta"]["card"]
    if here != there:
        return [f"the baseline was measured on {there}, and this is {here}: not compared"], 2
    before = {row["key"]: row for row in _measured(baseline["rows"]) if row["who"] == "ours"}
    after = [row for row in report["rows"] if row["key"] in before and row.get("failed") != NO_TIME]
    if not after:
        return ["the baseline has none of these rows: not compared"], 2
    slow = [row for row in after if _change(row, before) < -SLOWER]
    lines = ["| ours | before | now | change |", "|---|---|---|---|"]
    return lines + [_change_line(row, before, slow=row in slow) for row in after], 1 if slow else 0


def _change(row: Row, before: dict[str, Row]) -> float:
    was: float = before[row["key"]]["tok_s_gpu"]
    now: float = row.get("tok_s_gpu", 0)
    return now / was - 1


def _change_line(row: Row, before: dict[str, Row], *, slow: bool) -> str:
    now = f"failed: {row['failed'][:80]}" if "failed" in row else f"{row['tok_s_gpu']:,}"
    change = f"{_change(row, before):+.1%}" + (", too slow" if slow else "")
    return f"| {row['key']} | {before[row['key']]['tok_s_gpu']:,} | {now} | {change} |"


# --- files ------------------------------------------------------------------------------------------------------------


def read_report(path: Path) -> Report:
    """The report in a file. Ends the program with one line if there is none."""
    try:
        report = json.loads(path.read_text())
    except OSError as error:
        sys.exit(f"{path} cannot be read: {error.strerror}")
    except ValueError as error:
        sys.exit(f"{path} is no report of bench/train.py: {error}")
    if not isinstance(report, dict) or not {"meta", "rows"} <= report.keys():
        sys.exit(f"{path} is no report of bench/train.py: it has no `meta` and `rows`")
    return report


def write_report(path: Path, report: Report) -> None:
    path.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")


def put_between_marks(text: str, lines: Sequence[str]) -> str:
    """README's text with these lines between the marks."""
    before, rest = text.split(BEGIN)
    return "\n".join([before + BEGIN, *lines, END + rest.split(END)[1]])
