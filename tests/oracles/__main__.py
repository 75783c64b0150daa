"""`python -m tests.oracles`: compute every comparison and print the table of docs/correctness.md.

`--write` puts the table into that page. Exits 1 when a difference is beyond its tolerance.
"""

from __future__ import annotations

import os
import sys
from datetime import date
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from tests.oracles.measure import Measured
from tests.oracles.page import PAGE, render_table, with_table
from tests.oracles.table import ORACLES

PACKAGES = ("torch", "transformers", "trl", "peft", "tokenizers")


def main(arguments: list[str]) -> int:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the runs and their ranks print is no part of the answer
    torch.set_num_threads(1)
    measured = [_measure(number) for number in range(len(ORACLES))]
    table = render_table(measured, versions={name: version(name) for name in PACKAGES}, day=date.today())
    print(table, file=answers)
    if "--write" in arguments:
        PAGE.write_text(with_table(PAGE.read_text(), table))
    return int(not all(each.holds for each in measured))


def _measure(number: int) -> Measured:
    with TemporaryDirectory() as folder:
        return ORACLES[number].measure(Path(folder))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
