"""Rows of bench/train.py as JSON, as tables, and against a baseline. Pure but for reading and writing files."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from train_cases import PEAK_FLOPS, Contender, flops_per_token

Row = dict[str, Any]
NAMES = {
    "ours": "Torchferry", "titan": "torchtitan 0.2.2", "raw": "plain torch", "hf": "HF Trainer",
    "liger": "HF Trainer + Liger", "trl": "TRL",
}  # fmt: skip
SLOWER = 0.05
"""The part by which a row of ours may be slower than the baseline's."""
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"


def make_row(contender: Contender, measured: Row) -> Row:
    """A contender's row: median step, tokens a second and GPU, MFU, peak; or why it failed."""
    row: Row = {
        "key": contender.key, "who": contender.who, "model": contender.model, "gpus": contender.gpus,
        "seq_len": contender.seq_len, "micro_batch": contender.micro_batch, "packed": contender.packed,
        "label": contender.label, "options": contender.options,
    }  # fmt: skip
    if "failed" in measured:
        return {**row, "failed": measured["failed"]}
    median_s = statistics.median(measured["step_s"])
    # tokens that are trained on: a packed row has some padding at its end
    tokens = measured.get("tokens", contender.gpus * contender.micro_batch * contender.seq_len) / contender.gpus
    speed = tokens / median_s
    flops = (
        None
        if contender.packed or "lora" in contender.label.lower()
        else flops_per_token(contender.model, contender.seq_len)
    )
    return {
        **row,
        "step_ms": round(1e3 * median_s, 1),
        "step_ms_min": round(1e3 * min(measured["step_s"]), 1),
        "step_ms_max": round(1e3 * max(measured["step_s"]), 1),
        "tok_s_gpu": round(speed),
        "mfu": round(flops * speed / PEAK_FLOPS, 4) if flops else None,
        "peak_gib": round(measured["peak_gib"], 1),
        "first_step_s": measured.get("first_step_s"),
        **{name: measured[name] for name in ("data_wait_s", "notes", "loss") if name in measured},
    }


def render(rows: Sequence[Row]) -> list[str]:
    """A markdown table, each row beside the best of ours with the same model, GPUs and kind of rows."""
    lines = [
        "| | model | GPUs | rows | micro-batch | step ms (min-max) | tok/s/GPU | MFU | peak GiB | start s | ours is |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    return lines + [_line(row, rows) for row in rows]


def _line(row: Row, rows: Sequence[Row]) -> str:
    name = NAMES[row["who"]] + (f", {row['label']}" if row["label"] else "")
    where = f"| {name} | {row['model']} | {row['gpus']} | {_rows_text(row)} | {row['micro_batch']} |"
    if "failed" in row:
        return f"{where} {row['failed'][:80]} | | | | | |"
    mfu = f"{row['mfu']:.1%}" if row["mfu"] else ""
    first = f"{row['first_step_s']:.0f}" if row.get("first_step_s") else ""
    step = f"{row['step_ms']:.0f} ({row['step_ms_min']:.0f}-{row['step_ms_max']:.0f})"
    return f"{where} {step} | {row['tok_s_gpu']:,} | {mfu} | {row['peak_gib']:.1f} | {first} | {_ratio(row, rows)} |"


def _rows_text(row: Row) -> str:
    return f"{row['seq_len']}, " + ("packed documents" if row["packed"] else "full")


def _ratio(row: Row, rows: Sequence[Row]) -> str:
    """Our speed at the same micro-batch by this row's, and our best by it."""
    if row["who"] == "ours":
        return ""
    mine = [r for r in rows if r["who"] == "ours" and "failed" not in r and _same_work(r, row)]
    same = [r["tok_s_gpu"] for r in mine if r["micro_batch"] == row["micro_batch"]]
    best = [r["tok_s_gpu"] for r in mine]
    parts = [f"{max(same) / row['tok_s_gpu']:.2f} x"] if same else []
    if best and (not same or max(best) > max(same)):
        parts.append(f"{max(best) / row['tok_s_gpu']:.2f} x at its best")
    return ", ".join(parts)


def _same_work(a: Row, b: Row) -> bool:
    same = all(a[name] == b[name] for name in ("model", "gpus", "seq_len", "packed"))
    return same and ("lora" in a["label"].lower()) == ("lora" in b["label"].lower())


def compare(rows: Sequence[Row], baseline: Sequence[Row]) -> tuple[list[str], bool]:
    """Each row of ours beside the baseline's, and whether none is more than SLOWER slower."""
    before = {row["key"]: row for row in baseline if "failed" not in row}
    lines, good = [], True
    for row in (row for row in rows if row["who"] == "ours" and row["key"] in before):
        if "failed" in row:
            lines.append(f"{row['key']}: failed: {row['failed']}")
            good = False
            continue
        change = row["tok_s_gpu"] / before[row["key"]]["tok_s_gpu"] - 1
        slow = change < -SLOWER
        lines.append(f"{row['key']}: {row['tok_s_gpu']:,} tok/s/GPU, {change:+.1%}" + ("  TOO SLOW" if slow else ""))
        good &= not slow
    return lines, good


def render_readme(reports: Sequence[dict[str, Any]]) -> list[str]:
    """The short table: of each model the fastest row of everybody, and how many times as fast ours is at its
    micro-batch, or at our best one where we have no row of that."""
    lines = ["| model, GPUs, rows | " + " | ".join(NAMES[who] for who in NAMES) + " |", "|---" * (len(NAMES) + 1) + "|"]
    for report in reports:
        rows = [row for row in report["rows"] if "failed" not in row]
        works = {(r["model"], r["gpus"], r["seq_len"], r["packed"], "lora" in r["label"].lower()): r for r in rows}
        for work in works.values():
            mine = [row for row in rows if _same_work(row, work)]
            if {row["who"] for row in mine} > {"ours"}:
                lines.append(_readme_line(work, mine, report["meta"]["card"]))
    return lines


def _readme_line(work: Row, rows: Sequence[Row], card: str) -> str:
    best = {who: max((r["tok_s_gpu"] for r in rows if r["who"] == who), default=None) for who in NAMES}
    lora = " LoRA" if "lora" in work["label"].lower() else ""
    cells = [f"{work['model']}{lora}, {work['gpus']} x {card}, {_rows_text(work)}"]
    for who in NAMES:
        if best[who] is None:
            cells.append("")
        else:
            cells.append(f"{best[who]:,}{'' if who == 'ours' else _beside_ours(who, best[who], rows)}")
    return "| " + " | ".join(cells) + " |"


def _beside_ours(who: str, speed: int, rows: Sequence[Row]) -> str:
    size = next(row["micro_batch"] for row in rows if row["who"] == who and row["tok_s_gpu"] == speed)
    mine = [row for row in rows if row["who"] == "ours"]
    same = [row["tok_s_gpu"] for row in mine if row["micro_batch"] == size] or [row["tok_s_gpu"] for row in mine]
    return f" ({max(same) / speed:.2f} x)" if same else ""


def write_readme(readme: Path, reports: Sequence[dict[str, Any]]) -> None:
    """Put the short table between README's markers."""
    text = readme.read_text()
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    readme.write_text("\n".join([before + BEGIN, *render_readme(reports), END + after]))


def read_report(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())
