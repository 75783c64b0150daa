"""The client's own state: a folder that somebody else could have written into is not read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from deployer.errors import UsageError
from deployer.paths import state_dir
from tests.support.accounts import MALLORY, ROOT_ONLY, VICTIM, as_account, public_folder


def test_state_folder_is_made_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHFERRY_STATE_DIR", str(tmp_path / "a" / "state"))
    assert state_dir().stat().st_mode & 0o777 == 0o700


def test_state_folder_that_all_may_write_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHFERRY_STATE_DIR", str(tmp_path))
    tmp_path.chmod(0o770)
    with pytest.raises(UsageError, match="mode 770"):
        state_dir()
    tmp_path.chmod(0o707)
    with pytest.raises(UsageError, match="mode 707") as caught:
        state_dir()
    assert "chmod 700" in caught.value.hint


@ROOT_ONLY
def test_state_folder_that_another_user_made_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with public_folder(0o1777) as folder:
        state = folder / "state"
        state.mkdir()
        os.chown(state, MALLORY, MALLORY)
        monkeypatch.setenv("TORCHFERRY_STATE_DIR", str(state))
        with pytest.raises(UsageError, match=f"uid {MALLORY}"):
            as_account(VICTIM, state_dir)
        assert as_account(0, state_dir) == state  # as with sudo


def state_without_home() -> Path:
    for name in ("TORCHFERRY_STATE_DIR", "HOME", "XDG_STATE_HOME"):
        os.environ.pop(name, None)
    return state_dir()


@ROOT_ONLY
def test_account_without_a_home_has_to_name_its_state_folder() -> None:
    with pytest.raises(UsageError, match="no home folder") as caught:
        as_account(VICTIM, state_without_home)
    assert "TORCHFERRY_STATE_DIR" in caught.value.hint
