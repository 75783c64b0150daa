"""Schedules of the simulated world, and the faults that the search must find. At length: `make simulate N=…`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from subprocess import PIPE

import pytest

from tests.support.ferry import REPO
from tests.support.limits import HANG_S
from tests.world.planted import CHOSEN, PLANTED
from tests.world.trainer.planted import PLANTED as OF_TRAINER

COUNT = 200
"""The same on every machine: what a quicker one would reach nobody has seen."""


def world(*words: str) -> subprocess.CompletedProcess[str]:
    env = {name: text for name, text in os.environ.items() if name != CHOSEN}
    return subprocess.run(
        [sys.executable, "-m", "tests.world", *words], cwd=REPO, env=env, capture_output=True, text=True
    )


def find(name: str, seed: int, *more: str) -> subprocess.CompletedProcess[str]:
    """The search for a planted fault: at the seed that finds it here, and where Python makes other calls from 0 on."""
    found = world(*more, "--seed", str(seed), "--plant", name)
    return found if found.returncode else world(*more, "--count", "3000", "--most", "1", "--plant", name)


def test_no_schedule_breaks_a_promise() -> None:
    done = world("--count", str(COUNT), "--workers", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["schedules"], found["failed"]) == (COUNT, 0)


@pytest.mark.parametrize("word", ["--count", "--workers", "--most", "--every"])
@pytest.mark.parametrize("number", ["0", "-1"])
def test_search_of_nothing_is_refused(word: str, number: str) -> None:
    done = world(word, number)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith(f"error: argument {word}: {number} is less than 1\n")


def test_interrupted_search_says_how_far_it_is() -> None:
    words = [sys.executable, "-m", "tests.world", "--count", "1000000"]
    with subprocess.Popen(words, cwd=REPO, stdout=PIPE, stderr=PIPE, text=True, start_new_session=True) as search:
        time.sleep(5)  # whether it has begun or not
        os.killpg(search.pid, signal.SIGINT)
        stdout, stderr = search.communicate(timeout=HANG_S)
    assert search.returncode == 130 and "Traceback" not in stderr, stderr
    assert json.loads(stdout)["failed"] == 0


def test_nobody_reads_a_search_any_more() -> None:
    words = [sys.executable, "-m", "tests.world", "--seed", "1", "2"]
    with subprocess.Popen(words, cwd=REPO, stdout=PIPE, stderr=PIPE) as search:
        assert search.stdout is not None and search.stderr is not None
        search.stdout.close()
        assert search.stderr.read() == b""
    assert search.returncode == -signal.SIGPIPE


def test_seed_is_a_schedule() -> None:
    first, second = world("--seed", "16"), world("--seed", "16")
    assert first.stdout == second.stdout and "all invariants hold" in first.stdout
    assert world("--seed", "17").stdout != first.stdout


def test_crash_in_any_write_of_a_state_file_breaks_no_promise() -> None:
    done = world("--every", "300")
    assert done.returncode == 0 and " crashes in the writes of state files" in done.stdout, done.stdout + done.stderr


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_crash_after_any_byte_of_a_state_file_breaks_no_promise() -> None:
    done = world("--every", "1")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", [*PLANTED, *OF_TRAINER])
def test_planted_fault_stands_for_a_place_in_the_sources(name: str) -> None:
    fault = {**PLANTED, **OF_TRAINER}[name]
    source = REPO.joinpath(*fault.module.split(".")).with_suffix(".py")
    assert [source.read_text().count(old) for old, _ in ((fault.old, ""), *fault.more)] == [1] * (1 + len(fault.more))


@pytest.mark.parametrize("name", PLANTED)
def test_planted_fault_is_found(name: str) -> None:
    found = find(name, PLANTED[name].seed)
    assert found.returncode == 1 and "all invariants hold" not in found.stdout, found.stdout + found.stderr
    assert "Traceback" not in found.stderr


def test_seeds_of_planted_faults_hold_without_them() -> None:
    done = world("--seed", *sorted({str(fault.seed) for fault in PLANTED.values()}))
    assert done.returncode == 0, done.stdout + done.stderr


def test_failure_is_told_with_the_shortest_schedule_and_what_replays_it() -> None:
    found = world("--first", "16", "--count", "1", "--workers", "1", "--plant", "offset one too high")
    told = found.stdout.splitlines()
    assert found.returncode == 1 and told[0].startswith("seed 16, commit ")
    assert "  python -m tests.world --seed 16 --plant 'offset one too high'" in told
    assert sum(line.startswith("    job ") for line in told) == 1 and not any("fault" in line for line in told[1:-2])
