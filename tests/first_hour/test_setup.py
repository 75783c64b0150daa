"""A setup runs once for what it names; later jobs have what it made."""

from __future__ import annotations

import json
import os
import signal
import time
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.ferry import Ferry
from tests.support.limits import HANG_S, PATIENCE

MAKES = """\
echo setup runs with $(cat wanted.txt)
echo once >> "$TORCHFERRY_SETUP_DIR/runs"
mkdir -p empty data
echo small > data/small
head -c 2000000 /dev/zero > data/large
mkdir -p "$VIRTUAL_ENV/lib/own"
site=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo 'word = "installed"' > "$site/from_setup.py"
"""
SHOWS = """\
import os, sys, from_setup
kept = open(os.environ["TORCHFERRY_SETUP_DIR"] + "/runs").read().split()
print("job has", from_setup.word, len(kept), os.listdir("empty"), os.path.getsize("data/large"), end=" ")
print(open("data/small").read().strip(), os.environ["VIRTUAL_ENV"] == sys.prefix)
"""
SEES = b"job has installed 1 [] 2000000 small True\n"
SETUP = ("--setup", "sh makes.sh # wanted.txt")
JOB = ("--no-pull", "--", "python", "shows.py")


@pytest.fixture
def ferry(ferry: Ferry) -> Ferry:
    ferry.write("makes.sh", MAKES)
    ferry.write("wanted.txt", "numbers")
    ferry.write("shows.py", SHOWS)
    return ferry


def environments(ferry: Ferry) -> list[Path]:
    return [path for path in (ferry.root / "envs").iterdir() if path.is_dir()]


def status(ferry: Ferry, job_id: str | None = None) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((ferry.job(job_id) / "status.json").read_text())
    return loaded


def processes_with(word: bytes) -> Iterator[int]:
    for path in Path("/proc").iterdir():
        try:
            if path.name.isdigit() and word in (path / "cmdline").read_bytes():
                yield int(path.name)
        except OSError:
            continue


def test_second_launch_reuses_it_and_a_changed_file_that_it_names_runs_it_again(ferry: Ferry) -> None:
    first = ferry.run("run", *ferry.where(), *SETUP, *JOB)
    assert first.returncode == 0 and first.stdout == SEES, first.stderr.decode()
    assert b"setup runs with numbers" in first.stderr
    ferry.write("shows.py", SHOWS + "# the setup does not name this\n")
    second = ferry.run("run", *ferry.where(), *SETUP, *JOB)
    assert second.returncode == 0 and second.stdout == SEES, second.stderr.decode()
    assert b"setup runs" not in second.stderr and b"setup: what it made before is reused" in second.stderr
    jobs = ferry.job_ids()
    links = [ferry.root / "jobs" / job_id / "code" / "data" / "large" for job_id in jobs]
    assert len({link.readlink() for link in links}) == 1  # kept once, however large
    ferry.write("wanted.txt", "other numbers")
    third = ferry.run("run", *ferry.where(), *SETUP, *JOB)
    assert third.returncode == 0 and b"setup runs with other numbers" in third.stderr
    assert len(environments(ferry)) == 2
    again = ferry.run("resume", jobs[0], "--no-pull")
    assert again.returncode == 0 and b"what it made before is reused" in again.stderr, again.stderr.decode()


def test_failed_setup_ends_the_job_with_its_code_and_words_and_is_not_kept(ferry: Ferry) -> None:
    words = ("run", *ferry.where(), "--setup", "echo half > data; echo no such wheel; exit 7", *JOB)
    for _ in range(2):  # the second time it runs again
        done = ferry.run(*words)
        assert done.returncode == 7 and b"failed: the setup failed with code 7: no such wheel" in done.stderr
        assert b"--- last lines of the preparation" in done.stderr and b"job has" not in done.stdout
    assert environments(ferry) == []
    first_line_counts = ferry.run("run", *ferry.where(), "--setup", "false\ntrue", *JOB)
    assert first_line_counts.returncode == 1 and b"failed: the setup failed with code 1" in first_line_counts.stderr


def test_setup_that_hangs_is_ended_with_all_its_processes(ferry: Ferry) -> None:
    hangs = "(setsid sleep 86398 &); sleep 86399"
    done = ferry.run("run", *ferry.where(), "--setup", hangs, "--setup-timeout", "1s", *JOB)
    assert done.returncode == 125 and b"the setup was ended after 1 s" in done.stderr, done.stderr.decode()
    assert b"hint: --setup-timeout gives it more time" in done.stderr
    assert [*processes_with(b"86398"), *processes_with(b"86399")] == [] and environments(ferry) == []


def test_what_a_setup_leaves_running_is_ended(ferry: Ferry) -> None:
    leaves = "trap '' TERM HUP; (setsid sleep 86397 > /dev/null 2>&1 &)"
    done = ferry.run("run", *ferry.where(), "--setup", leaves, "--no-pull", "--", "true")
    assert done.returncode == 0 and b"setup: ended what it left running (1)" in done.stderr, done.stderr.decode()
    assert list(processes_with(b"86397")) == []


def test_two_at_once_run_it_once(ferry: Ferry) -> None:
    ferry.write("makes.sh", MAKES + "sleep 2\n")
    clients = [ferry.start("run", *ferry.where(), *SETUP, *JOB) for _ in range(2)]
    said = [client.communicate(timeout=HANG_S) for client in clients]
    assert [out for out, _ in said] == [SEES, SEES], [err.decode() for _, err in said]
    waited = [b"another launch runs it" in err or b"is reused" in err for _, err in said]
    assert sorted(waited) == [False, True] and len(environments(ferry)) == 1


def test_stop_ends_a_setup(ferry: Ferry) -> None:
    client = ferry.start("run", *ferry.where(), "--setup", "echo begun; sleep 86396", *JOB)
    deadline = time.monotonic() + 60 * PATIENCE
    while not list(processes_with(b"sleep\x0086396")) and time.monotonic() < deadline:
        time.sleep(0.05)
    client.send_signal(signal.SIGINT)  # it goes, the job stays
    client.communicate(timeout=HANG_S)
    (job_id,) = ferry.job_ids()
    assert ferry.run("stop", job_id, "--grace", "2").returncode == 0
    assert status(ferry)["state"] == "stopped" and list(processes_with(b"86396")) == []


def test_interpreter_of_the_users_own_is_the_setups(ferry: Ferry, tmp_path: Path) -> None:
    own = tmp_path / "own"
    venv.create(own, with_pip=False)
    command = 'python -c \'import sys; print("setup in", sys.prefix)\'; touch "$TORCHFERRY_SETUP_DIR/x"'
    job = ("--no-pull", "--", "python", "-c", "import sys; print('job in', sys.prefix)")
    done = ferry.run("run", *ferry.where(), "--python", str(own), "--setup", command, *job)
    assert done.returncode == 0, done.stderr.decode()
    assert f"setup in {own}".encode() in done.stderr and done.stdout == f"job in {own}\n".encode()


def test_dry_run_says_it_and_runs_nothing(ferry: Ferry) -> None:
    done = ferry.run("run", *ferry.where(), "--dry-run", *SETUP, "--", "true")
    assert done.returncode == 0 and b"# setup    sh makes.sh # wanted.txt: before the job" in done.stdout
    assert not ferry.root.exists()


def test_gc_takes_it_once_no_job_needs_it(ferry: Ferry) -> None:
    assert ferry.run("run", *ferry.where(), *SETUP, *JOB).returncode == 0
    (environment,) = environments(ferry)
    slots = status(ferry)["groups"][0]["slots"]  # what the job names stays: also what its environment lies over
    assert slots["setup"] == str(environment) and slots["below"] != slots["python"] == f"{environment}/bin/python"
    old = time.time() - 3 * 86400
    os.utime(environment, (old, old))
    assert ferry.run("gc", *ferry.where(), "--yes").returncode == 0 and environment.exists()
    assert ferry.run("gc", *ferry.where(), "--keep-jobs", "0", "--yes").returncode == 0
    assert ferry.job_ids() == [] and not environment.exists()
