"""Checkpoints of nodes that share no run folder: each keeps its part, and only whole ones count."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.trainer.nodes.bringing import Folder, to_bring
from tests.trainer.nodes.on_nodes import FULL, checkpoints, losses_in, start, state_of
from trainer.checkpoint.errors import CheckpointError
from trainer.checkpoint.folders import damages, is_complete
from trainer.checkpoint.load import read_full
from trainer.checkpoint.spread import Spread
from trainer.errors import ConfigError
from trainer.export.checkpoint import find_source, load_trained
from trainer.typed import from_json

STEPS = ["step_000002", "step_000004"]
LAST = f"checkpoints/{STEPS[1]}"


@pytest.fixture(scope="module")
def whole(rows, tmp_path_factory) -> list[float]:
    """The losses of an uninterrupted run in one process."""
    folder = tmp_path_factory.mktemp("whole")
    start([1], rows, [folder])
    return losses_in(folder)


def stopped(rows: str, folder: Path, parallel: dict) -> Path:
    """The run folders a and b of two nodes with two ranks each; the run stopped after step 4 and saved at 2 and 4."""
    first = start([2, 2], rows, [folder / "a", folder / "b"], parallel=parallel, stop_after_steps=4)
    assert first[0]["storages"]["of_rank"] == (0, 0, 1, 1)
    return folder


@pytest.fixture(scope="module")
def replicas(rows, tmp_path_factory) -> Path:
    return stopped(rows, tmp_path_factory.mktemp("replicas"), {})


@pytest.fixture(scope="module")
def shards(rows, tmp_path_factory) -> Path:
    return stopped(rows, tmp_path_factory.mktemp("shards"), FULL)


def copy_of(folder: Path, target: Path) -> list[Path]:
    shutil.copytree(folder, target)
    return [target / "a", target / "b"]


def spread_of(checkpoint: Path) -> Spread:
    return from_json(state_of(checkpoint)["spread"], Spread)


def bring(checkpoints: Sequence[Path]) -> None:
    """Copy what each node lacks, as the deployer does before a start."""
    folders = [
        Folder([file.name for file in path.iterdir()], spread_of(path)) if path.exists() else Folder((), None)
        for path in checkpoints
    ]
    for target, files in zip(checkpoints, to_bring(folders), strict=True):
        for name, source in files.items():
            assert source is not None
            target.mkdir(exist_ok=True)
            shutil.copyfile(checkpoints[source] / name, target / name)


def test_each_node_keeps_a_part_that_says_what_the_other_holds(shards):
    for number, node in enumerate("ab"):
        assert checkpoints(shards / node) == STEPS
        state, spread = state_of(shards / node / LAST), spread_of(shards / node / LAST)
        assert (state["format"], spread.storage) == (4, number)
        assert set(spread.mine.files) == {f"__{2 * number}_0.distcp", f"__{2 * number + 1}_0.distcp", ".metadata"}
        assert set(spread.own) == set(spread.mine.files) | {f"random_{rank}.pt" for rank in range(4)}
        assert damages(shards / node / LAST, state["files"]) == []
        assert [part.ranks for part in spread.parts] == [(0, 1), (2, 3)]
        assert len(spread.needs) == 4
    assert spread_of(shards / "a" / LAST).save == spread_of(shards / "b" / LAST).save
    assert not (shards / "b" / "metrics.jsonl").exists()


def test_node_with_a_replica_needs_nothing_of_the_others(replicas):
    assert spread_of(replicas / "a" / LAST).needs == ("__0_0.distcp", "__1_0.distcp")
    assert spread_of(replicas / "b" / LAST).needs == ("__2_0.distcp", "__3_0.distcp")


@pytest.mark.parametrize("kind", ["replicas", "shards"])
def test_nodes_go_on_where_they_were_with_the_same_losses(rows, tmp_path, whole, kind, request):
    parallel = FULL if kind == "shards" else {}
    folders = copy_of(request.getfixturevalue(kind), tmp_path / "run")
    again = start([2, 2], rows, folders, parallel=parallel)
    assert [one["start"] for one in again] == [4] * 4
    assert losses_in(folders[0]) == pytest.approx(whole, abs=1e-5)
    assert ("2 replicas x 2 shards" in again[0]["plan"]) is (kind == "replicas")
    assert any(line.startswith("mesh: ") for line in again[0]["lines"])


def test_one_node_of_two_with_a_replica_each_has_all_that_any_mesh_needs(rows, tmp_path, replicas, whole):
    folder = copy_of(replicas, tmp_path / "run")[1]
    assert start([1], rows, [folder])[0]["start"] == 4
    assert losses_in(folder) == pytest.approx(whole[4:], abs=1e-5)


def test_another_mesh_names_the_files_that_it_lacks_and_goes_on_once_they_are_brought(rows, tmp_path, shards, whole):
    folders = copy_of(shards, tmp_path / "run")
    with pytest.raises(RuntimeError, match=r"lacks __2_0.distcp, __3_0.distcp, which node 1 \(\S+\) had"):
        start([3], rows, folders[:1])
    assert checkpoints(folders[0]) == STEPS
    bring([folder / LAST for folder in folders])
    assert start([3], rows, folders[:1])[0]["start"] == 4
    assert losses_in(folders[0]) == pytest.approx(whole, abs=1e-5)


def test_node_with_an_empty_disk_is_named_and_goes_on_once_it_has_a_part(rows, tmp_path, shards, whole):
    folders = copy_of(shards, tmp_path / "run")
    donor = shutil.copytree(folders[1] / LAST, tmp_path / "kept")
    shutil.rmtree(folders[1])
    with pytest.raises(
        RuntimeError, match=r"no checkpoint in \S+ is whole on all nodes: .*step_000004: node 1 \(\S+\) has no"
    ):
        start([2, 2], rows, folders, parallel=FULL)
    (folders[1] / "checkpoints").mkdir()
    bring([*(folder / LAST for folder in folders), donor])
    assert start([2, 2], rows, folders, parallel=FULL)[0]["start"] == 4
    assert losses_in(folders[0]) == pytest.approx(whole, abs=1e-5)


def test_newer_checkpoint_that_one_node_lacks_is_set_aside_and_the_one_before_taken(rows, tmp_path, shards):
    folders = copy_of(shards, tmp_path / "run")
    shutil.rmtree(folders[1] / LAST)
    first = start([2, 2], rows, folders, parallel=FULL, stop_after_steps=1)[0]
    assert first["start"] == 2
    assert "has no part of it; it is .bad_step_000004 now" in first["told"]
    assert checkpoints(folders[0]) == [".bad_step_000004", "step_000002", "step_000003"]
    assert checkpoints(folders[1]) == ["step_000002", "step_000003"]


def test_part_is_not_exported_before_it_has_the_files_of_the_others(tmp_path, shards):
    here, there = copy_of(shards, tmp_path / "run")
    with pytest.raises(ConfigError, match=r"this node lacks __2_0\.distcp, __3_0\.distcp, which node 1"):
        load_trained(find_source(here, None))
    with pytest.raises(CheckpointError, match=r"step_000004 is not whole: this node lacks __2_0\.distcp"):
        read_full(here / LAST)
    bring([here / LAST, there / LAST])
    exported, kept = load_trained(find_source(here, None)).state_dict(), read_full(here / LAST)["model"]
    assert all(torch.equal(exported[name], tensor) for name, tensor in kept.items()) and len(kept) > 10


def test_rank_that_dies_between_two_markers_loses_no_checkpoint(rows, tmp_path, whole):
    folders = [tmp_path / "a", tmp_path / "b"]
    with pytest.raises(RuntimeError, match="rank 2 ended without a result"):
        start([2, 2], rows, folders, dies=(2, "marker"))
    assert checkpoints(folders[1]) == [".tmp_step_000002"]
    sealed = is_complete(folders[0] / "checkpoints" / STEPS[0])
    again = start([2, 2], rows, folders)
    assert again[0]["start"] == (2 if sealed else 0)
    assert losses_in(folders[0]) == pytest.approx(whole, abs=1e-5)


def test_part_that_cannot_get_its_name_takes_the_others_back(rows, tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    first = start([1, 1], rows, folders, blocks=1, stop_after_steps=4)[0]
    assert "warning: rank 1: cannot write the checkpoint" in first["told"]
    assert checkpoints(folders[0]) == ["step_000004"]
    assert is_complete(folders[1] / LAST) and not is_complete(folders[1] / "checkpoints" / STEPS[0])


def test_savers_write_parts_beside_the_training_and_old_ones_go_on_every_node(rows, tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    start([1, 1], rows, folders, savers=True, async_save=True, keep_last=2)
    assert [checkpoints(folder) for folder in folders] == [["step_000006", "step_000008"]] * 2
    assert spread_of(folders[1] / "checkpoints" / "step_000006").mine.ranks == (1,)
