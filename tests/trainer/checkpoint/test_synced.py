"""What a power cut leaves: each file of a checkpoint is synced once all of it has left the process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.saves import save, start, step
from tests.support.tiny import ALONE
from trainer.checkpoint.folders import steps_in
from trainer.files import replace_text


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """How long each file was when it was synced last, by inode."""
    sizes: dict[int, int] = {}
    fsync = os.fsync

    def note(descriptor: int) -> None:
        found = os.fstat(descriptor)
        sizes[found.st_ino] = found.st_size
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    return sizes


def test_every_file_of_a_checkpoint_is_synced_whole(tmp_path: Path, synced: dict[int, int]) -> None:
    model, optimizer = start(ALONE)
    step(model, optimizer)
    checkpoint = save(tmp_path, 2, model, optimizer, {"data": {"step": 2}}, ALONE)
    files = {file.name: file.stat() for file in checkpoint.iterdir()}
    assert {name: synced.get(found.st_ino) for name, found in files.items()} == {
        name: found.st_size for name, found in files.items()
    }
    assert {".metadata", "COMPLETE", "state.json", "__0_0.distcp", "random_0.pt"} <= set(files)


def test_file_that_is_replaced_is_synced_before_it_has_its_name(tmp_path: Path, synced: dict[int, int]) -> None:
    replace_text(tmp_path / "outcome.json", "{}\n")
    assert synced[(tmp_path / "outcome.json").stat().st_ino] == 3


def test_folder_that_cannot_be_listed_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    assert steps_in(folder) == {}
    folder.symlink_to(folder)  # too many links
    with pytest.raises(OSError, match="checkpoints"):
        steps_in(folder)
