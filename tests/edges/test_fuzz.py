"""The fuzz (fuzz.py), for some seconds with the other tests and at length in the soak."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.edges.fuzz import LEAST
from tests.support.ferry import REPO
from tests.support.limits import patient

ALONE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c", '"$@"; exit $?', "sh"]
"""With a /proc of its own, where that is allowed; the shell reaps what is orphaned."""
SECONDS = patient(25)


def fuzz(place: Path, kind: str, first: int, count: int, seconds: float) -> dict[str, Any]:
    may = subprocess.run([*ALONE, "true"], capture_output=True).returncode == 0
    argv = [sys.executable, "-m", "tests.edges.fuzz", kind, str(first), str(count), str(seconds)]
    place.mkdir()
    done = subprocess.run(
        [*(ALONE if may else ()), *argv],
        cwd=place,
        env={**os.environ, "PYTHONPATH": str(REPO)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_damaged_files_break_nothing_but_their_own_row(tmp_path: Path) -> None:
    assert fuzz(tmp_path / "place", "files", 0, 20_000, SECONDS)["commands"] >= LEAST


def test_damaged_messages_are_one_error(tmp_path: Path) -> None:
    assert fuzz(tmp_path / "place", "messages", 0, 20_000, SECONDS)["commands"] >= LEAST


@pytest.mark.soak
def test_twenty_thousand_commands(tmp_path: Path) -> None:
    assert fuzz(tmp_path / "files", "files", 100_000, 14_000, patient(3600))["commands"] == 14_000
    assert fuzz(tmp_path / "messages", "messages", 200_000, 6_000, patient(1800))["commands"] == 6_000


@pytest.mark.soak
def test_five_hundred_commands_as_processes(tmp_path: Path) -> None:
    assert fuzz(tmp_path / "place", "processes", 300_000, 500, patient(1800))["commands"] == 500
