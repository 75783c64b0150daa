"""The same losses on every mesh of nodes, and checkpoints that move between them over a shared run folder."""

from __future__ import annotations

import pytest

from tests.trainer.nodes.on_nodes import checkpoints, losses_in, start, state_of


def test_checkpoints_move_between_meshes_of_nodes_with_the_same_losses(rows, tmp_path):
    shared = tmp_path / "shared"
    for number, counts in enumerate([[4], [2, 2], [1, 1, 1, 1], [1]]):
        ranks = start(counts, rows, [shared] * len(counts), stop_after_steps=2)
        assert [one["start"] for one in ranks] == [2 * number] * sum(counts)
        assert all(one["storages"] is None for one in ranks)
    assert checkpoints(shared) == [f"step_{step:06d}" for step in (2, 4, 6, 8)]
    assert "spread" not in state_of(shared / "checkpoints" / "step_000004")
    start([1], rows, [tmp_path / "alone"])
    assert losses_in(shared) == pytest.approx(losses_in(tmp_path / "alone"), abs=1e-5)


@pytest.mark.parametrize("backend", ["fsdp", "ddp"])
def test_two_nodes_with_a_rank_each_have_the_losses_of_one_process(rows, tmp_path, backend):
    start([1, 1], rows, [tmp_path / "a", tmp_path / "b"], backend=backend, save_every=0)
    start([1], rows, [tmp_path / "alone"], save_every=0)
    assert losses_in(tmp_path / "a") == pytest.approx(losses_in(tmp_path / "alone"), abs=1e-5)
