"""Schedules of the trainer in the simulated world, and the faults that the search must find."""

from __future__ import annotations

import json

import pytest

from tests.world.test_world import find, world
from tests.world.trainer.planted import PLANTED

COUNT = 100


def test_no_schedule_breaks_a_promise_of_the_trainer() -> None:
    done = world("--trainer", "--count", str(COUNT), "--workers", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["schedules"], found["failed"]) == (COUNT, 0)


def test_seed_is_a_schedule_of_the_trainer() -> None:
    first, second = world("--trainer", "--seed", "16"), world("--trainer", "--seed", "16")
    assert first.stdout == second.stdout and "all invariants hold" in first.stdout


@pytest.mark.parametrize("name", PLANTED)
def test_fault_planted_in_the_trainer_is_found(name: str) -> None:
    found = find(name, PLANTED[name].seed, "--trainer")
    assert found.returncode == 1 and "all invariants hold" not in found.stdout, found.stdout + found.stderr
    assert "Traceback" not in found.stderr


def test_seeds_of_faults_planted_in_the_trainer_hold_without_them() -> None:
    done = world("--trainer", "--seed", *sorted({str(fault.seed) for fault in PLANTED.values()}))
    assert done.returncode == 0, done.stdout + done.stderr


def test_failure_of_the_trainer_is_told_with_the_shortest_schedule() -> None:
    name = "retention that forgets the best"
    seed = str(PLANTED[name].seed)
    found = world("--trainer", "--first", seed, "--count", "1", "--workers", "1", "--plant", name)
    told = found.stdout.splitlines()
    assert found.returncode == 1 and told[0].startswith(f"seed {seed}, commit ")
    assert f"  python -m tests.world --seed {seed} --trainer --plant '{name}'" in told
    assert sum(line.startswith("    start ") for line in told) == 1 and not any("fault" in line for line in told[1:-2])
