"""What an asynchronous save costs the steps beside it: a run of ours that saves once, its steps before, during, after.

    python bench/save.py --model 1.5b --micro-batch 4 --save-every 250 --out save.json
    python bench/save.py --model 1.5b --micro-batch 4 target.train_backend=fsdp

The run is `train.py` as anybody starts it. A step lasts from the end of the one before to its own, so what a save takes
of the training is in it. `--save-every`: steps until the save begins, which must end before as many more.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

from train_cases import SHAPES, ours  # noqa: E402
from train_ours import MORE_STEPS, last_word, run_until, step_records  # noqa: E402
from train_processes import leave  # noqa: E402

from train import begin_report  # noqa: E402

BEFORE, AFTER = 100, 10
"""Steps before and after the save that are measured."""
FEW = 10
"""Steps beside a save; fewer are no measurement."""
SAVED = re.compile(r"saved \S+ \(the training waited ([\d.]+) s, written in ([\d.]+) s\)")
SYNCHRONOUS = "saves stop the training"
"""Printed by a run whose saves are not, or no longer, beside the training."""
FIXED = ("train.steps", "train.log_every", "train.async_save")
"""Settings that the measurement depends on."""


def parse() -> tuple[argparse.Namespace, dict[str, Any]]:
    """The options, and the settings of the config. Exits with 2 if they are invalid."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model", default="1.5b", choices=list(SHAPES), help="a shape of bench/train.py")
    made.add_argument("--gpus", type=int, default=1, help="GPUs, or processes on the CPU")
    made.add_argument("--seq-len", type=int, default=2048, help="tokens of a row")
    made.add_argument("--micro-batch", type=int, default=4, help="rows of a GPU and step")
    made.add_argument("--save-every", type=int, default=250, help="steps until the save, which has as many to end")
    made.add_argument("--limit-s", type=float, default=600, help="the run is ended after so many seconds")
    made.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: for a try with the tiny model")
    made.add_argument("--out", type=Path, help="write what was measured (JSON) here")
    made.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="of the config, as train.py takes them")
    asked = made.parse_args()
    settings = dict(setting.partition("=")[::2] for setting in asked.settings)
    if bad := [setting for setting in asked.settings if "=" not in setting]:
        made.error(f"{bad[0]}: not KEY=VALUE")
    if "train.save_every" in settings:
        made.error("train.save_every: said by --save-every")
    if fixed := [key for key in FIXED if key in settings]:
        made.error(f"{fixed[0]}: one save is measured, beside the training, step by step")
    if not 2 <= asked.save_every <= MORE_STEPS // 2:
        made.error(f"--save-every: 2 to {MORE_STEPS // 2}, not {asked.save_every}")
    if asked.out and not asked.out.parent.is_dir():
        made.error(f"--out: there is no folder {asked.out.parent}")
    return asked, {**settings, "train.save_every": asked.save_every}


def main() -> int:
    signal.signal(signal.SIGTERM, leave)
    asked, settings = parse()
    label = " ".join(asked.settings)
    row = ours(asked.model, asked.seq_len, asked.micro_batch, gpus=asked.gpus, label=label, **settings)
    report = begin_report(asked.device, None)
    say = f"{row.key}: {asked.save_every} steps, a save and the steps beside it, {asked.limit_s:g} s at most"
    print(say, file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="tf-save-") as folder:
        metrics, log = run_until(
            row,
            Path(folder),
            device=asked.device,
            limit_s=asked.limit_s,
            is_enough=lambda metrics, log: has_ended(metrics, log, asked.save_every),
        )
    found = SAVED.search(log)
    if found is None or SYNCHRONOUS in log:
        sys.exit(why_none(metrics, log, asked.save_every))
    steps_s = [record["step_s"] for record in step_records(metrics)]
    blocked_s, written_s = map(float, found.groups())
    parts = split_steps(steps_s, asked.save_every, written_s=written_s)
    lines = [f"{row.key}: blocked {blocked_s:.2f} s, written in {written_s:.2f} s", *table(parts)]
    print("\n".join(lines))
    if asked.out:
        rows = [{"key": row.key, "blocked_s": blocked_s, "written_s": written_s, **parts}]
        asked.out.write_text(json.dumps({**report, "rows": rows}, indent=1) + "\n")
    return 0


def has_ended(metrics: str, log: str, save_every: int) -> bool:
    """Whether the save and some steps after it have ended, or the next save has come, which waits for the first."""
    steps_s = [record["step_s"] for record in step_records(metrics)]
    if len(steps_s) >= 2 * save_every:
        return True
    found = SAVED.search(log)
    return found is not None and len(split_steps(steps_s, save_every, written_s=float(found[2]))["after"]) == AFTER


def why_none(metrics: str, log: str, save_every: int) -> str:
    """Why a run gives no figures of a save beside the training."""
    synchronous = [line for line in log.splitlines() if SYNCHRONOUS in line]
    if synchronous:
        return f"the save was not beside the training: {synchronous[0]}"
    count = len(step_records(metrics))
    if count < 2 * save_every:
        return f"the run ended after {count} steps, before its save had: {last_word(log)}"
    return f"no save has ended before step {2 * save_every} (raise --save-every): {last_word(log)}"


def split_steps(steps_s: Sequence[float], at: int, *, written_s: float) -> dict[str, list[float]]:
    """Seconds of the steps before, during and after a save at a step."""
    before, later = list(steps_s[max(1, at - BEFORE) : at]), list(steps_s[at : 2 * at])
    count = 1 + sum(end < written_s for end in accumulate(later[:-1]))
    return {"before": before, "during": later[:count], "after": later[count : count + AFTER]}


def table(parts: dict[str, list[float]]) -> list[str]:
    """Lines with, for each part, its number of steps, their mean and slowest in ms, and both divided by the mean
    before."""
    usual = statistics.mean(parts["before"])
    lines = [
        "| steps | number | mean ms | slowest ms | mean / mean before | slowest / mean before |",
        "|---|---|---|---|---|---|",
    ]
    for name, steps in parts.items():
        if steps:
            mean, slowest = statistics.mean(steps), max(steps)
            figures = f"{1e3 * mean:.1f} | {1e3 * slowest:.1f} | {mean / usual:.3f} x | {slowest / usual:.2f} x"
            lines.append(f"| {name} | {len(steps)} | {figures} |")
    first = " ".join(f"{1e3 * step:.0f}" for step in parts["during"][:12])
    lines.append(f"ms of the first steps from the save on: {first}")
    if len(parts["during"]) < FEW:
        lines.append("The save ended so soon that this says little: a larger model says more.")
    return lines


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
