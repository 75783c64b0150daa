"""Tokens per second of our trainer beside others on the same card, shapes, precision and rows.

    python bench/train.py --case 0.5b,1.5b --out results.json          # ours and every peer that is installed
    python bench/train.py --case 7b-l14 --peers none --baseline bench/train_baseline.json   # 1 when 5 % slower
    python bench/train.py --table results.json                         # tables of what was measured

fp32 master weights and AdamW, bf16 products, clipping at 1.0, random first weights and random tokens, every position a
target. Median of 8 steps after 4. Ours is `train.py` as anybody starts it, with its own data loading; the peers run
from `bench/peers/`. Compare rows of one report only: cards differ, and so do days.
"""

from __future__ import annotations

import argparse
import json
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from typing import Any, NoReturn

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from train_cases import CASES, Contender  # noqa: E402
from train_ours import run_ours  # noqa: E402
from train_peers import lacking, run_peers  # noqa: E402
from train_report import Row, compare, make_row, read_report, render, write_readme  # noqa: E402

PACKAGES = ("torch", "triton", "transformers", "accelerate", "peft", "trl", "liger-kernel", "torchtitan", "torchao")
SECONDS = {"ours": 40, "raw": 25, "titan": 25, "hf": 25, "liger": 25, "trl": 30}
"""About what a row takes, for `--plan`."""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--case", default="0.5b,1.5b", help=f"of {', '.join(CASES)}, joined by commas")
    made.add_argument("--peers", default="all", help="all, none, names as raw,titan, or only:NAMES without ours")
    made.add_argument("--only", metavar="TEXT", help="rows whose key holds one of these texts, joined by commas")
    made.add_argument("--gpu", type=int, default=0, help="the first GPU to use")
    made.add_argument("--out", type=Path, help="write the report (JSON) here, after every row")
    made.add_argument("--append", action="store_true", help="add to the report of this machine that --out names")
    made.add_argument("--budget-s", type=float, default=3600, help="start nothing after so many seconds")
    made.add_argument("--baseline", type=Path, help="compare ours with this report: 1 when a row is 5 %% slower")
    made.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    made.add_argument("--warm", type=int, default=4, help="steps before those that count")
    made.add_argument("--steps", type=int, default=8, help="steps that count")
    made.add_argument("--plan", action="store_true", help="list what would run, and about how long")
    made.add_argument("--table", type=Path, nargs="+", help="print the tables of these reports and run nothing")
    made.add_argument("--readme", action="store_true", help="with --table: write the short table into README.md")
    return made


def main() -> int:
    signal.signal(signal.SIGTERM, _leave)  # what is being measured is ended on the way out, as after Ctrl-C
    chosen = parser().parse_args()
    if chosen.table:
        return show(chosen.table, readme=chosen.readme)
    contenders = choose(chosen.case.split(","), chosen.peers)
    if chosen.only:
        contenders = [row for row in contenders if any(text in row.key for text in chosen.only.split(","))]
    if chosen.plan:
        for contender in contenders:
            print(f"{SECONDS[contender.who]:4} s  {contender.key}")
        print(f"{sum(SECONDS[c.who] for c in contenders):4} s in all")
        return 0
    rows = run_all(contenders, chosen)
    print("\n".join(render(rows)))
    return judge(rows, chosen.baseline) if chosen.baseline else 0


def choose(cases: Sequence[str], peers: str) -> list[Contender]:
    """The rows of these cases in order, ours first in each; peers that are not installed are named and left out."""
    unknown = [case for case in cases if case not in CASES]
    if unknown:
        sys.exit(f"no case {', '.join(unknown)}; there are {', '.join(CASES)}")
    wanted = [row for case in cases for row in CASES[case]]
    if peers != "all":
        names = set(peers.removeprefix("only:").split(",")) | (set() if peers.startswith("only:") else {"ours"})
        wanted = [row for row in wanted if row.who in names or ("all" in names and row.who != "ours")]
    absent = {row.who: lacking(row.who) for row in wanted if row.who != "ours"}
    for who, packages in absent.items():
        if packages:
            print(f"{who} is left out: {', '.join(packages)} not installed", file=sys.stderr)
    return [row for row in wanted if not absent.get(row.who)]


def run_all(contenders: Sequence[Contender], chosen: argparse.Namespace) -> list[Row]:
    began, meta = time.monotonic(), describe_machine(chosen.device)
    rows: list[Row] = []
    if chosen.append and chosen.out.exists():
        before = read_report(chosen.out)
        if before["meta"]["card"] != meta["card"]:
            sys.exit(f"{chosen.out} is of {before['meta']['card']}, and this is {meta['card']}")
        rows, meta = before["rows"], {**meta, "command": f"{before['meta']['command']}; {meta['command']}"}
    with tempfile.TemporaryDirectory(prefix="tf-bench-") as name:
        for (who, _gpus), group in groupby(contenders, key=lambda row: (row.who, row.gpus)):
            part = list(group)
            left = chosen.budget_s - (time.monotonic() - began)
            for contender, measured in zip(part, measure(who, part, Path(name), chosen, left), strict=True):
                rows.append(make_row(contender, measured))
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
            if chosen.out:
                chosen.out.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")
    return rows


def measure(
    who: str, contenders: list[Contender], folder: Path, chosen: argparse.Namespace, left: float
) -> list[dict[str, Any]]:
    if who != "ours":
        log = chosen.out.with_suffix(f".{who}.log") if chosen.out else folder / f"{who}.log"
        return run_peers(contenders, warm=chosen.warm, steps=chosen.steps, limit_s=left, log=log, gpu=chosen.gpu)
    found = []
    began = time.monotonic()
    for number, contender in enumerate(contenders):
        place = Path(tempfile.mkdtemp(dir=folder, prefix=f"ours-{number}-"))
        rest = left - (time.monotonic() - began)
        if rest < SECONDS["ours"]:
            found.append({"failed": "no time was left"})
            continue
        settings = {"device": chosen.device, "warm": chosen.warm, "steps": chosen.steps, "gpu": chosen.gpu}
        found.append(run_ours(contender, place, limit_s=min(rest, 240), **settings))
        if chosen.out:
            with chosen.out.with_suffix(".ours.log").open("a") as log:
                log.write(f"== {contender.key}\n{(place / 'log.txt').read_text(errors='replace')}")
    return found


def _leave(number: int, _: object) -> NoReturn:
    sys.exit(128 + number)


def describe_machine(device: str) -> dict[str, Any]:
    """Card, versions, date and command of a report."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "card": card_name() if device == "cuda" else platform.processor() or "CPU",
        "date": time.strftime("%Y-%m-%d"),
        "command": "python bench/train.py " + " ".join(sys.argv[1:]),
        "python": platform.python_version(),
        "versions": versions,
    }


def card_name() -> str:
    """As torch names it; asked of nvidia-smi, for torch would take memory of the card to be measured."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()


def judge(rows: Sequence[Row], path: Path) -> int:
    """0 when ours is as fast as the baseline, 1 when it is slower, 2 when the two cannot be compared."""
    baseline = read_report(path)
    card = describe_machine("cuda")["card"] if rows else ""
    if baseline["meta"]["card"] != card:
        print(f"{path} was measured on {baseline['meta']['card']}, and this is {card}: not compared", file=sys.stderr)
        return 2
    lines, good = compare(rows, baseline["rows"])
    print("\n".join(lines or ["the baseline has none of these rows"]))
    return 0 if good and lines else 1 if lines else 2


def show(paths: Sequence[Path], *, readme: bool) -> int:
    reports = [read_report(path) for path in paths]
    for path, report in zip(paths, reports, strict=True):
        meta = report["meta"]
        print(f"\n{path}: {meta['card']}, {meta['date']}, {meta['versions']}\n")
        print("\n".join(render(report["rows"])))
    if readme:
        write_readme(HERE.parent / "README.md", reports)
    return 0


if __name__ == "__main__":
    sys.exit(main())
