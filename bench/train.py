"""Tokens per second of our trainer beside others on the same card, shapes, precision and rows.

    python bench/train.py --case 0.5b,1.5b --out results.json          # ours and every peer that is installed
    python bench/train.py --case 0.5b --rounds 3 --out results.json    # every row three times, interleaved
    python bench/train.py --case 7b-l14 --peers none --baseline bench/results/NAME.json   # 1 when 5 % slower
    python bench/train.py --table results.json                         # tables of what was measured
    python bench/train.py --readme --write                             # the short table of bench/results into README.md

fp32 master weights and AdamW, bf16 products, clipping at 1.0, random first weights and random tokens, every position a
target. Median of 8 steps after 4. Ours is `train.py` as anybody starts it, with its own data loading; the peers run
from `bench/peers/`. "start s" is from the start of the process to the end of its first step. Compare rows of one report
only: cards differ, and so do days.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
README = HERE.parent / "README.md"
sys.path[:0] = [str(HERE), str(HERE.parent)]

from train_cases import CASES, Contender  # noqa: E402
from train_ours import run_ours  # noqa: E402
from train_peers import lacking, run_peers  # noqa: E402
from train_processes import leave  # noqa: E402
from train_report import (  # noqa: E402
    NO_TIME,
    Report,
    Row,
    add_row,
    judge,
    make_row,
    of_runs,
    put_between_marks,
    read_report,
    render,
    render_readme,
    write_report,
)

PACKAGES = ("torch", "triton", "transformers", "accelerate", "peft", "trl", "liger-kernel", "torchtitan", "torchao")
SECONDS = {"ours": 40, "raw": 25, "titan": 25, "hf": 25, "liger": 25, "trl": 30}
"""Approximate seconds for a row, for `--plan`."""
LIMIT_S = 240
"""Seconds for one run of ours."""


def _count(least: int) -> Callable[[str], int]:
    def count(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} on")
        return int(text)

    return count


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--case", default="0.5b,1.5b", help=f"of {', '.join(CASES)}, joined by commas")
    made.add_argument("--peers", default="all", help="all, none, names as raw,titan, or only:NAMES without ours")
    made.add_argument("--only", metavar="TEXT", help="rows whose key holds one of these texts, joined by commas")
    made.add_argument("--gpu", type=_count(0), default=0, help="the first GPU to use")
    made.add_argument("--out", type=Path, help="write the report (JSON) here, after every row, and logs beside it")
    made.add_argument("--append", action="store_true", help="add to the report of this machine that --out names")
    made.add_argument("--budget-s", type=float, default=3600, help="start nothing after so many seconds")
    made.add_argument(
        "--baseline", type=Path, help="compare ours with it: 1 when a row is 5 %% slower, 2 not comparable"
    )
    made.add_argument("--device", default="auto", choices=["auto", "cuda", "cpu"], help="auto: cuda where a GPU is")
    made.add_argument("--warm", type=_count(0), default=4, help="steps before those that count")
    made.add_argument("--steps", type=_count(1), default=8, help="steps that count")
    made.add_argument("--rounds", type=_count(1), default=1, help="run all rows so many times, one round after another")
    made.add_argument("--plan", action="store_true", help="list what would run, and about how long")
    made.add_argument("--table", type=Path, nargs="+", help="print the tables of these reports and run nothing")
    made.add_argument("--readme", action="store_true", help="the short table instead; of the committed reports")
    made.add_argument("--write", action="store_true", help="with --readme: put it between the marks in README.md")
    return made


def main() -> int:
    signal.signal(signal.SIGTERM, leave)
    chosen = parser().parse_args()
    if chosen.table or chosen.readme:
        return show(chosen.table or committed_reports(), readme=chosen.readme, write=chosen.write)
    contenders = choose(chosen.case.split(","), chosen.peers, chosen.only)
    if chosen.plan:
        return show_plan(contenders, chosen.rounds)
    baseline = read_report(chosen.baseline) if chosen.baseline else None  # before minutes are spent
    if chosen.out and not chosen.out.parent.is_dir():
        sys.exit(f"--out: there is no folder {chosen.out.parent}")
    bench = Bench(
        resolve_device(chosen.device), chosen.gpu, chosen.warm, chosen.steps, chosen.budget_s, chosen.out, chosen.rounds
    )
    report = bench.run(contenders, begin_report(bench.device, chosen.out if chosen.append else None))
    print("\n".join(render(report["rows"])))
    if baseline is None:
        return 0
    lines, code = judge(report, baseline)
    print("\n".join(["", *lines]))
    return code


# --- what runs --------------------------------------------------------------------------------------------------------


def choose(cases: Sequence[str], peers: str, only: str | None = None) -> list[Contender]:
    """The rows of these cases in order, ours first in each. Peers that are not installed are named and left out."""
    unknown = [case for case in cases if case not in CASES]
    if unknown:
        sys.exit(f"no case {', '.join(unknown)}; there are {', '.join(CASES)}")
    strange = set(peers.removeprefix("only:").split(",")) - {*SECONDS, "all", "none"}
    if strange:
        sys.exit(f"--peers: no peer {', '.join(sorted(strange))}; there are {', '.join(SECONDS)}")
    wanted = [row for case in cases for row in CASES[case] if _is_wanted(row, peers)]
    if only:
        wanted = [row for row in wanted if any(text in row.key for text in only.split(","))]
    if not wanted:
        sys.exit(f"no row of --case {','.join(cases)} is asked for by --peers and --only; --plan lists rows")
    for row in wanted:
        first = next(other for rows in CASES.values() for other in rows if other.cache == row.cache)
        if row.cache and first not in wanted:
            sys.exit(f"{row.key} takes over what {first.key} has compiled: ask for both")
    absent = {who: lacking(who) for who in dict.fromkeys(row.who for row in wanted) if who != "ours"}
    for who, packages in absent.items():
        if packages:
            print(f"{who} is left out: {', '.join(packages)} not installed", file=sys.stderr)
    return [row for row in wanted if not absent.get(row.who)]


def _is_wanted(row: Contender, peers: str) -> bool:
    names = peers.removeprefix("only:").split(",")
    if row.who == "ours":
        return "ours" in names or not peers.startswith("only:")
    return row.who in names or "all" in names


def resolve_device(device: str) -> str:
    if device != "auto":
        return device
    return "cuda" if shutil.which("nvidia-smi") else "cpu"


def show_plan(contenders: Sequence[Contender], rounds: int) -> int:
    for contender in contenders:
        print(f"{SECONDS[contender.who]:4} s  {contender.key}")
    print(f"{rounds * sum(SECONDS[c.who] for c in contenders):4} s in all, about")
    return 0


@dataclass(frozen=True)
class Bench:
    """The measuring settings of one call."""

    device: str
    gpu: int
    warm: int
    steps: int
    budget_s: float
    out: Path | None
    rounds: int = 1

    def run(self, contenders: Sequence[Contender], report: Report) -> Report:
        """The report with a row for each contender. Each row is written to disk as soon as it is measured."""
        if any(row.cache for row in contenders):  # so that no row alone reads the packages from a cold disk
            subprocess.run([sys.executable, "-c", "import torch, transformers"], check=False, capture_output=True)
        runs: dict[str, list[Row]] = {}
        with tempfile.TemporaryDirectory(prefix="tf-bench-") as folder:
            for contender, measured in self._measure(contenders, Path(folder)):
                row = make_row(contender, measured)
                print(json.dumps(row), file=sys.stderr, flush=True)
                runs.setdefault(row["key"], []).append(row)
                report = {**report, "rows": add_row(report["rows"], of_runs(runs[row["key"]]))}
                if self.out:
                    write_report(self.out, report)
        return report

    def _measure(self, contenders: Sequence[Contender], folder: Path) -> Iterator[tuple[Contender, dict[str, Any]]]:
        deadline = time.monotonic() + self.budget_s
        for _ in range(self.rounds):
            yield from self._measure_once(contenders, folder, deadline)

    def _measure_once(
        self, contenders: Sequence[Contender], folder: Path, deadline: float
    ) -> Iterator[tuple[Contender, dict[str, Any]]]:
        for (who, _gpus), group in groupby(contenders, key=lambda row: (row.who, row.gpus)):
            part = list(group)
            run = self._ours(part, folder, deadline) if who == "ours" else self._peers(part, folder, deadline)
            for measured, contender in zip(run, part, strict=True):
                yield contender, measured

    def _peers(self, part: Sequence[Contender], folder: Path, deadline: float) -> Iterator[dict[str, Any]]:
        log = self._log(part[0].who, folder)
        left_s = deadline - time.monotonic()
        return run_peers(part, warm=self.warm, steps=self.steps, limit_s=left_s, log=log, gpu=self.gpu)

    def _ours(self, part: Sequence[Contender], folder: Path, deadline: float) -> Iterator[dict[str, Any]]:
        for contender in part:
            left_s = deadline - time.monotonic()
            if left_s < SECONDS["ours"]:
                yield {"failed": NO_TIME}
                continue
            place = Path(tempfile.mkdtemp(dir=folder, prefix="ours-"))
            yield run_ours(
                contender,
                place,
                device=self.device,
                warm=self.warm,
                steps=self.steps,
                limit_s=min(left_s, LIMIT_S),
                gpu=self.gpu,
            )
            with self._log("ours", folder).open("a") as log:
                log.write(f"== {contender.key}\n{(place / 'log.txt').read_text(errors='replace')}")

    def _log(self, who: str, folder: Path) -> Path:
        return self.out.with_suffix(f".{who}.log") if self.out else folder / f"{who}.log"


# --- the machine ------------------------------------------------------------------------------------------------------


def begin_report(device: str, former: Path | None) -> Report:
    """An empty report of this machine, or the former one, to be extended."""
    meta = {
        "card": card_name() if device == "cuda" else platform.processor() or "CPU",
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join([f"python bench/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "python": platform.python_version(),
        "versions": installed_versions(),
    }
    if former is None or not former.exists():
        return {"meta": meta, "rows": []}
    before = read_report(former)
    if before["meta"]["card"] != meta["card"]:
        sys.exit(f"{former} is of {before['meta']['card']}, and this is {meta['card']}")
    return {"meta": {**meta, "command": f"{before['meta']['command']}; {meta['command']}"}, "rows": before["rows"]}


def card_name() -> str:
    """The GPU's name as in torch, but from nvidia-smi: torch would take memory on the card to be measured."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"no GPU is seen here ({error}); `--device cpu` with `--case tiny` or `--model tiny` runs without one")
    return done.stdout.splitlines()[0].strip()


def installed_versions() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


# --- what was measured ------------------------------------------------------------------------------------------------


def committed_reports() -> list[Path]:
    return sorted((HERE / "results").glob("*.json"))


def show(paths: Sequence[Path], *, readme: bool, write: bool) -> int:
    reports = [read_report(path) for path in paths]
    if readme:
        lines = render_readme(reports)
        if write:
            README.write_text(put_between_marks(README.read_text(), lines))
        print("\n".join(lines))
        return 0
    for path, report in zip(paths, reports, strict=True):
        print("\n".join(["", _title(path, report), "", *render(report["rows"])]))
    return 0


def _title(path: Path, report: Report) -> str:
    meta = report["meta"]
    versions = ", ".join(f"{name} {number}" for name, number in meta["versions"].items())
    return f"{path.name}: {meta['card']}, {meta['date']}, {versions}"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
