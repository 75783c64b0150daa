"""Runs that would not end by themselves: `tests.run` ends them, says what ran, and leaves no process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ferry import REPO
from tests.support.jobs import wait_for
from tests.support.limits import HANG_S, PATIENCE_NAME
from tests.support.notes import FOLDER_NAME

HOOKS = "from tests.support.notes import *\n"
STAYS = "import time\ndef test_stays(): time.sleep(100000)\n"
DAEMON = """
import os, subprocess, sys, time
def test_leaves_a_daemon():
    code = "import os, time\\nif os.fork(): os._exit(0)\\nopen('daemon', 'w').write(str(os.getpid()))\\ntime.sleep(999)"
    subprocess.run([sys.executable, "-c", code], start_new_session=True)
    while not (os.path.exists("daemon") and os.path.getsize("daemon")): time.sleep(0.01)
"""
BLOCKED = """
import ctypes, pytest, signal
@pytest.mark.timeout(1)
def test_fatal():
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
    ctypes.PyDLL(None).pause()
"""
TWO = ("-n", "2", "--dist", "loadfile")


def fatal(line: str) -> str:
    return f"import os, signal, time\ndef test_fatal():\n    {line}\n    time.sleep(100000)\n"


def start(folder: Path, *words: str, patience: float = 1, **tests: str) -> subprocess.Popen[str]:
    """`tests.run` over files of tests, with hooks of ours alone."""
    for name, text in {"conftest": HOOKS, **tests}.items():
        (folder / f"{name}.py").write_text(text)
    env = {name: value for name, value in os.environ.items() if name != FOLDER_NAME and not name.startswith("PYTEST_")}
    env |= {"PYTHONPATH": str(REPO), PATIENCE_NAME: str(patience), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "tests.run", "-p", "no:cacheprovider", "-p", "pytest_timeout", "-p", "xdist", "-q"]
    command += words
    return subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def run(folder: Path, *words: str, patience: float = 1, **tests: str) -> tuple[int, str]:
    """(exit code, what it said); fails where a process still has its output, for then this never ends."""
    started = start(folder, *words, patience=patience, **tests)
    said, _ = started.communicate(timeout=HANG_S)
    return started.returncode, said


@pytest.mark.parametrize("line", ["os.kill(os.getpid(), signal.SIGKILL)", "os._exit(0)"])
def test_worker_that_dies_ends_the_run_though_the_other_is_busy(line, tmp_path):
    code, said = run(tmp_path, *TWO, test_a=fatal(line), test_b=STAYS)
    assert code == 1
    assert "died while it ran test_a.py::test_fatal" in said


def test_worker_whose_death_pytest_cannot_see_ends_the_run(tmp_path):
    forks = fatal("os.fork() and os.kill(os.getpid(), signal.SIGKILL)")  # the child holds the pipes
    code, said = run(tmp_path, *TWO, patience=0.1, test_a=forks, test_b=STAYS)
    assert code == 124
    assert "died while it ran test_a.py::test_fatal, and pytest goes on waiting" in said
    assert "test_b.py::test_stays, for" in said


def test_stopped_worker_is_ended_and_named(tmp_path):
    stops = fatal("os.kill(os.getpid(), signal.SIGSTOP)")
    code, said = run(tmp_path, *TWO, patience=0.1, test_a=stops, test_b=STAYS)
    assert code in (1, 124)  # by pytest, which sees it die, if it has told so within its patience
    assert "was stopped for 2 s while it ran test_a.py::test_fatal" in said


def test_hang_in_c_that_hears_no_signal_is_ended_and_named(tmp_path):
    code, said = run(tmp_path, patience=0.05, test_a=BLOCKED)
    assert code == 128 + signal.SIGKILL
    assert "runs test_a.py::test_fatal for" in said and "than pytest-timeout can end" in said


def test_bound_of_all_tests_names_what_runs_and_ends_daemons_too(tmp_path):
    code, said = run(tmp_path, "--within", "20", patience=0.2, test_a=DAEMON, test_b=STAYS)
    assert code == 124
    assert "the tests did not end within 20 s" in said
    assert "main: test_b.py::test_stays, for" in said
    assert not alive(int((tmp_path / "daemon").read_text()))


def test_run_that_passes_leaves_no_process_either(tmp_path):
    code, said = run(tmp_path, "--beside", "1", test_a=DAEMON)
    assert code == 0
    assert "1 processes of the tests were left and are ended now" in said
    assert not alive(int((tmp_path / "daemon").read_text()))


def test_pytest_that_ends_in_a_test_is_no_success(tmp_path):
    code, said = run(tmp_path, test_a=fatal("os._exit(0)"))
    assert code == 1
    assert "pytest ended with 0 while it ran test_a.py::test_fatal" in said


def test_term_ends_the_run_and_all_its_processes(tmp_path):
    started = start(tmp_path, patience=0.2, test_a=DAEMON, test_b=STAYS)
    wait_for((tmp_path / "daemon").exists)
    started.terminate()
    said, _ = started.communicate(timeout=HANG_S)
    assert started.returncode == 128 + signal.SIGTERM
    assert "ended by SIGTERM" in said
    assert not alive(int((tmp_path / "daemon").read_text()))


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
