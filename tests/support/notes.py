"""Hooks for pytest: each process notes what it runs, and a worker that dies ends the run at once.

What pytest-xdist does with a worker that dies depends on what the others do: it runs the deadly test again and again,
or waits for ever. The notes, files in a folder, say what the worker ran; `tests/run.py` watches them from outside.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.limits import PATIENCE, SOAK_TEST_S, TEST_S

FOLDER_NAME = "TORCHFERRY_TEST_NOTES"
"""Of the folder with the notes; the workers of a run inherit it."""
LIMIT = pytest.StashKey[float]()


def note(config: pytest.Config, test: str, limit_s: float = TEST_S) -> None:
    """Say what this process does from now on; whoever reads it sees the one note or the other."""
    path = _own_note(config)
    if path is not None:
        told = {"worker": path.stem, "pid": os.getpid(), "test": test, "since": time.monotonic(), "limit_s": limit_s}
        aside = path.with_suffix(".new")
        aside.write_text(json.dumps(told))
        aside.rename(path)


def read_note(path: Path) -> dict[str, Any] | None:
    """None where there is none, any more or yet."""
    try:
        told: dict[str, Any] = json.loads(path.read_text())
        return told
    except FileNotFoundError:
        return None


def limit_of(item: pytest.Item) -> float:
    """Seconds that a test may take: as the command says, as its mark does, or by its kind."""
    said = item.config.getoption("timeout", None)
    if said is not None:
        return float(said) or float("inf")
    mark = item.get_closest_marker("timeout")
    if mark:
        return float(mark.args[0]) * PATIENCE
    return SOAK_TEST_S if item.get_closest_marker("soak") else TEST_S


def pytest_configure(config: pytest.Config) -> None:
    if _number_of_workers(config) and FOLDER_NAME not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="torchferry-notes-")
        config.add_cleanup(folder.cleanup)
        os.environ[FOLDER_NAME] = folder.name


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.stash[LIMIT] = limit_of(item)
        if item.config.getoption("timeout", None) is None:
            item.add_marker(pytest.mark.timeout(item.stash[LIMIT]), append=False)


def pytest_sessionstart(session: pytest.Session) -> None:
    note(session.config, "the collection of its tests")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    note(item.config, item.nodeid, item.stash[LIMIT])
    result = yield
    note(item.config, f"nothing any more, after {item.nodeid}")
    return result


def pytest_unconfigure(config: pytest.Config) -> None:
    path = _own_note(config)
    if path is not None:
        path.unlink(missing_ok=True)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: Any) -> None:
    """Of pytest-xdist, in the process that hands out the tests: a worker has ended, well or not."""
    if error:
        told = read_note(Path(os.environ[FOLDER_NAME]) / f"{node.gateway.id}.json")
        ran = told["test"] if told else "nothing yet"
        pytest.exit(f"worker {node.gateway.id} died while it ran {ran} ({error})", returncode=1)


def _number_of_workers(config: pytest.Config) -> int:
    return 0 if hasattr(config, "workerinput") else len(getattr(config.option, "tx", None) or ())


def _own_note(config: pytest.Config) -> Path | None:
    """Of a process that runs tests: a worker, or pytest itself where there are none."""
    folder = os.environ.get(FOLDER_NAME)
    if folder is None or _number_of_workers(config):
        return None
    return Path(folder) / f"{getattr(config, 'workerinput', {}).get('workerid', 'main')}.json"
