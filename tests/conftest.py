"""What every test has: state, results and homes of its own, never the user's."""

from pathlib import Path

import pytest

from tests.ferry import Ferry


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHFERRY_STATE_DIR", str(tmp_path / "state"))


@pytest.fixture
def ferry(tmp_path: Path) -> Ferry:
    """A client with an empty project, on this machine as host."""
    project = tmp_path / "project"
    project.mkdir()
    return Ferry(project, tmp_path / "state", tmp_path / "root")
