"""The simulated Linux answers as the real one does: the same small programs run in both.

Where the two differ and may, so that no case asks for it:

| What | In the simulated Linux | Why |
|---|---|---|
| A pipe's room | counts bytes: 64 KiB always fit | Linux counts pages, and is full earlier after odd writes |
| `lseek` to the end of a folder | 0 bytes on | Linux leaves it to the file system |
| `/` among a case's names | of one file system with the case | a real case lies in a mount of its own (EXDEV) |
| `sigtimedwait` | tells `si_signo` alone | a pending signal keeps no sender |
| SIGTSTP, SIGTTIN, SIGTTOU | are dropped | as Linux does for a group that no shell looks after; no case has another |
| A forked child's memory | is its parent's | one Python runs all processes |
| `environ` of a zombie | is told | old and new kernels refuse it differently |
| `waitid` | looks at any child, waits for none | no more is used; anything else is refused aloud |
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.world.same.cases import CASES
from tests.world.same.real import RealLinux
from tests.world.same.sequences import Step, make_sequence
from tests.world.same.simulated import simulate, simulate_sequence

SEQUENCES = 300
SEEDS = 1, 2, 3
"""Schedules of the simulated Linux: a case's answer depends on none."""


@pytest.fixture(scope="module")
def linux() -> Iterator[RealLinux]:
    real = RealLinux()
    yield real
    real.close()


@pytest.mark.parametrize("name", CASES)
def test_case_is_the_same(name: str, linux: RealLinux):
    real = linux.ask("case", name)
    assert real, "a case tells something"
    for seed in SEEDS:
        assert simulate(name, seed) == real, f"left: the world, under seed {seed}; right: Linux"


def differs(linux: RealLinux, steps: list[Step]) -> bool:
    (real,) = linux.ask("sequences", [steps])
    return bool(simulate_sequence(steps, 1) != real)


def shortest(linux: RealLinux, steps: list[Step]) -> list[Step]:
    """What of a sequence is needed for the difference."""
    at = len(steps)
    while at:
        at -= 1
        if differs(linux, shorter := steps[:at] + steps[at + 1 :]):
            steps = shorter
    return steps


def test_random_sequences_of_file_operations_are_the_same(linux: RealLinux):
    sequences = [make_sequence(seed) for seed in range(SEQUENCES)]
    for seed, (steps, real) in enumerate(zip(sequences, linux.ask("sequences", sequences), strict=True)):
        if simulate_sequence(steps, 1) != real:
            steps = shortest(linux, steps)
            told: list[Any] = simulate_sequence(steps, 1)
            (real,) = linux.ask("sequences", [steps])
            lines = [
                f"{step}: {ours!r}, in Linux {theirs!r}"
                for step, ours, theirs in zip([*steps, "tree"], told, real, strict=True)
            ]
            pytest.fail(f"sequence {seed}:\n" + "\n".join(lines))
