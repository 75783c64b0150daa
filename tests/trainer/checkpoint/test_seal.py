"""The file that holds all checksums of a checkpoint has one itself: no change of it goes unseen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.saves import as_of_format_2, save, start, step
from tests.support.tiny import ALONE
from trainer.checkpoint.errors import CheckpointError
from trainer.checkpoint.load import read_full, read_info
from trainer.checkpoint.retention import Keep, prune
from trainer.schema import CHECKPOINT_MARKER

EXTRA = {"data": {"step": 2, "row": 168, "fingerprint": "a1"}, "total_steps": 28, "eval_loss": 1.5, "config": {}}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    model, optimizer = start(ALONE)
    step(model, optimizer)
    return save(tmp_path, 2, model, optimizer, EXTRA, ALONE)


def is_refused(checkpoint: Path) -> bool:
    try:
        read_info(checkpoint)
    except CheckpointError as error:
        assert str(checkpoint) in str(error)
        assert "state.json " in str(error) or "COMPLETE " in str(error)
        return True
    return False


def is_json(data: bytes) -> bool:
    try:
        return isinstance(json.loads(data), dict)
    except ValueError:
        return False


@pytest.mark.parametrize("name", ["state.json", "COMPLETE"])
def test_every_single_changed_bit_is_refused(checkpoint, name):
    file = checkpoint / name
    whole = file.read_bytes()
    still_json = 0
    for place in range(8 * len(whole)):
        data = bytearray(whole)
        data[place // 8] ^= 1 << place % 8
        file.write_bytes(data)
        still_json += is_json(bytes(data))
        assert is_refused(checkpoint), data
    assert still_json > len(whole) // 2  # what only a checksum can tell
    file.write_bytes(whole)
    assert read_info(checkpoint).extra == EXTRA


@pytest.mark.parametrize("name", ["state.json", "COMPLETE"])
def test_every_cut_is_refused(checkpoint, name):
    file = checkpoint / name
    whole = file.read_bytes()
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        assert is_refused(checkpoint), length


@pytest.mark.parametrize(
    "marker", ["[]", "{}", "[" * 200_000, '{"state.json": [1, 1e999]}', '{"state.json": ["a", 1]}']
)
def test_marker_of_another_kind_is_refused(checkpoint, marker):
    (checkpoint / CHECKPOINT_MARKER).write_text(marker)
    with pytest.raises(CheckpointError, match="COMPLETE has other content than was written"):
        read_info(checkpoint)


def test_marker_may_say_more_in_a_later_version(checkpoint):
    marker = checkpoint / CHECKPOINT_MARKER
    marker.write_text(json.dumps({**json.loads(marker.read_text()), "signed": "by nobody"}))
    assert read_info(checkpoint).has_verified_state


def test_checkpoint_of_an_earlier_version_says_that_nothing_seals_it(checkpoint):
    assert read_info(checkpoint).has_verified_state
    as_of_format_2(checkpoint)
    assert not read_info(checkpoint).has_verified_state


def test_whole_state_is_not_read_from_a_shard_that_has_changed(checkpoint):
    shard = checkpoint / "__0_0.distcp"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"__0_0.distcp has other content than was written"):
        read_full(checkpoint)


def test_loss_in_a_state_that_has_changed_keeps_no_checkpoint(tmp_path):
    model, optimizer = start(ALONE)
    for number, loss in enumerate((1.5, 2.5, 3.5), start=1):
        path = save(tmp_path, number, model, optimizer, {"eval_loss": loss}, ALONE)
        state = path / "state.json"
        if number == 2:
            state.write_text(state.read_text().replace("2.5", "0.5"))
    prune(tmp_path, Keep(last=1, best=1), newest=3)
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["step_000001", "step_000003"]


def test_checkpoint_whose_state_cannot_be_read_now_may_be_the_best_and_stays(tmp_path):
    model, optimizer = start(ALONE)
    for number, loss in enumerate((1.5, 2.5, 3.5), start=1):
        save(tmp_path, number, model, optimizer, {"eval_loss": loss}, ALONE)
    state = tmp_path / "step_000001" / "state.json"
    state.rename(state.with_name("kept"))
    state.symlink_to("state.json")  # ELOOP, as a disk or a network that fails for a moment
    prune(tmp_path, Keep(last=1, best=1), newest=3)
    assert (tmp_path / "step_000001").is_dir() and (tmp_path / "step_000003").is_dir()
