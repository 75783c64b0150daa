"""Checkpoints of nodes that share no run folder: each keeps its part, and only whole ones count."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.trainer.nodes.on_nodes import FULL, checkpoints, losses_in, start, state_of
from trainer.checkpoint.folders import damages, is_complete, steps_in
from trainer.checkpoint.spread import Folder, Spread, to_bring
from trainer.typed import from_json

TWO = (2, 2)


@pytest.fixture(scope="module")
def whole(rows, tmp_path_factory) -> list[float]:
    """The losses of an uninterrupted run in one process."""
    folder = tmp_path_factory.mktemp("whole")
    start([1], rows, [folder])
    return losses_in(folder)


@pytest.mark.parametrize("parallel", [{}, FULL], ids=["a replica on each node", "sharded over the nodes"])
def test_nodes_with_folders_of_their_own_go_on_where_they_were(rows, tmp_path, whole, parallel):
    folders = [tmp_path / "a", tmp_path / "b"]
    first = start(TWO, rows, folders, parallel=parallel, stop_after_steps=4)
    assert first[0]["storages"]["of_rank"] == (0, 0, 1, 1)
    assert [checkpoints(folder) for folder in folders] == [["step_000002", "step_000004"]] * 2
    again = start(TWO, rows, folders, parallel=parallel)
    assert [one["start"] for one in again] == [4] * 4
    assert losses_in(folders[0]) == pytest.approx(whole, abs=1e-5)
    assert not (folders[1] / "metrics.jsonl").exists()
