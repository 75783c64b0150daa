"""A checkpoint is complete or absent, loads at another world size, and continues random numbers."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

from tests.support.accounts import ROOT_ONLY, VICTIM, as_account, public_folder
from tests.support.ranks import run_ranks
from tests.support.saves import Tied, save, start, step
from tests.support.tiny import ALONE
from trainer.checkpoint import write
from trainer.checkpoint.errors import CheckpointError
from trainer.checkpoint.folders import commit, newest_complete, restore_replaced
from trainer.checkpoint.load import load, load_model, read_full, read_info
from trainer.checkpoint.resume import choose
from trainer.checkpoint.retention import Keep, prune, to_delete
from trainer.checkpoint.states import random_state, set_random_state
from trainer.dist import Dist
from trainer.optim.build import build_optimizer
from trainer.schema import RESTARTED_ENV, Config, OptimConfig, TrainConfig


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def save_after_two_steps(dist: Dist, folder: str) -> list[torch.Tensor]:
    """Save at step 2, take one more step, and give the weights after it."""
    model, optimizer = start(dist)
    step(model, optimizer)
    step(model, optimizer)
    save(Path(folder), 2, model, optimizer, {"data": {"row": 5}}, dist)
    step(model, optimizer)
    return [full(p) for p in model.parameters()]


def load_and_step(dist: Dist, path: str) -> tuple[list[torch.Tensor], dict, bool]:
    model, optimizer = start(dist)
    resumed = load(Path(path), model, optimizer, dist)
    step(model, optimizer)
    tied = model.head.weight is model.embed.weight
    return [full(p) for p in model.parameters()], {"step": resumed.step, **resumed.extra}, tied


@pytest.mark.parametrize(("saved_at", "loaded_at"), [(1, 1), (1, 2), (2, 1), (2, 3)])
def test_next_step_after_load_is_the_same_at_any_world_size(tmp_path, saved_at, loaded_at):
    expected = run_ranks(save_after_two_steps, saved_at, str(tmp_path))[0]
    weights, extra, tied = run_ranks(load_and_step, loaded_at, str(tmp_path / "step_000002"))[0]
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(weights, expected, strict=True))
    assert extra == {"step": 2, "data": {"row": 5}}
    assert tied


def test_save_needs_no_process_group(tmp_path):
    expected = save_after_two_steps(ALONE, str(tmp_path))
    assert not torch.distributed.is_initialized()
    weights, _, _ = load_and_step(ALONE, str(tmp_path / "step_000002"))
    assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))


def test_save_leaves_only_the_final_folder(tmp_path):
    save_after_two_steps(ALONE, str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["step_000002"]


def test_save_replaces_what_a_killed_save_left(tmp_path):
    for leftover in (tmp_path / ".tmp_step_000002", tmp_path / "step_000002"):
        leftover.mkdir()
        (leftover / "__0_0.distcp").write_bytes(b"half a shard")
    save_after_two_steps(ALONE, str(tmp_path))
    assert load_and_step(ALONE, str(tmp_path / "step_000002"))[1]["step"] == 2


def test_save_over_a_complete_checkpoint_never_leaves_a_half_deleted_one(tmp_path, monkeypatch):
    model, optimizer = start(ALONE)
    save(tmp_path, 1, model, optimizer, {"start": 1}, ALONE)
    monkeypatch.setattr(shutil, "rmtree", lambda *args, **kwargs: None)  # a kill before anything is deleted
    save(tmp_path, 1, model, optimizer, {"start": 2}, ALONE)
    assert read_info(newest_complete(tmp_path)).extra == {"start": 2}
    monkeypatch.undo()
    save(tmp_path, 2, model, optimizer, {}, ALONE)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000001", "step_000002"]


def test_checkpoint_whose_replacement_was_killed_gets_its_name_back(tmp_path):
    model, optimizer = start(ALONE)
    save(tmp_path, 1, model, optimizer, {"start": 1}, ALONE)
    replaced = tmp_path / ".tmp_step_000001_replaced"
    (tmp_path / "step_000001").rename(replaced)  # and the new one has not got its name
    assert newest_complete(tmp_path) is None
    assert restore_replaced(tmp_path) == {}
    assert read_info(newest_complete(tmp_path)).extra == {"start": 1}
    (tmp_path / "step_000001").rename(replaced)
    save(tmp_path, 2, model, optimizer, {}, ALONE)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000001", "step_000002"]


def test_checkpoint_that_cannot_be_replaced_stays(tmp_path):
    save(tmp_path, 1, *start(ALONE), {"start": 1}, ALONE)
    aside = tmp_path / ".tmp_step_000001"
    aside.mkdir()

    def lose(point: str) -> None:
        if point == "replaced":
            shutil.rmtree(aside)

    with pytest.raises(FileNotFoundError):
        commit(aside, tmp_path / "step_000001", {}, lose)
    assert read_info(newest_complete(tmp_path)).extra == {"start": 1}


def test_loaded_optimizer_keeps_the_settings_it_was_built_with(tmp_path):
    save_after_two_steps(ALONE, str(tmp_path))
    model = Tied()
    optimizer = build_optimizer(model, OptimConfig(learning_rate=1e-3, weight_decay=0.5, beta2=0.9))
    load(tmp_path / "step_000002", model, optimizer, ALONE)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.0]
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.9)
    assert optimizer.state[model.embed.weight]["step"] == 2


@pytest.mark.parametrize("name", ["__0_0.distcp", "random_0.pt", "state.json"])
@pytest.mark.parametrize("kept", [0, 40])
def test_damaged_file_of_a_checkpoint_is_one_error_naming_the_checkpoint(tmp_path, name, kept):
    save_after_two_steps(ALONE, str(tmp_path))
    file = tmp_path / "step_000002" / name
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"cannot load .*step_000002: \w+.* move this folder away"):
        load(tmp_path / "step_000002", *start(ALONE), ALONE)


def save_a_nan_of_the_last_rank(dist: Dist, folder: str) -> str:
    model, optimizer = start(dist)
    if dist.rank == dist.world_size - 1:
        with torch.no_grad():
            local = model.embed.weight.to_local() if dist.world_size > 1 else model.embed.weight
            local[-1] = float("nan")
    with pytest.raises(CheckpointError) as caught:
        save(Path(folder), 2, model, optimizer, {}, dist)
    return str(caught.value)


@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_that_are_not_finite_are_not_saved(tmp_path, ranks):
    assert (
        "model embed.weight, model head.weight: values that are not finite"
        in run_ranks(save_a_nan_of_the_last_rank, ranks, str(tmp_path))[-1]
    )
    assert list(tmp_path.iterdir()) == []


def test_newest_complete_ignores_folders_without_marker_or_metadata(tmp_path):
    save_after_two_steps(ALONE, str(tmp_path))
    shutil.copytree(tmp_path / "step_000002", tmp_path / "step_000004")
    (tmp_path / "step_000004" / ".metadata").unlink()
    shutil.copytree(tmp_path / "step_000002", tmp_path / "step_000006")
    (tmp_path / "step_000006" / "COMPLETE").unlink()
    shutil.copytree(tmp_path / "step_000002", tmp_path / ".tmp_step_000008")
    assert newest_complete(tmp_path) == tmp_path / "step_000002"


def test_newest_complete_of_an_absent_folder_is_none(tmp_path):
    assert newest_complete(tmp_path / "checkpoints") is None


def test_loading_an_incomplete_checkpoint_is_refused(tmp_path):
    (tmp_path / "step_000001").mkdir()
    model, optimizer = start(ALONE)
    with pytest.raises(CheckpointError, match="step_000001 is not a complete checkpoint"):
        load(tmp_path / "step_000001", model, optimizer, ALONE)


def test_loading_into_another_shape_names_the_checkpoint(tmp_path):
    save_after_two_steps(ALONE, str(tmp_path))
    model = Tied(vocab=9)
    optimizer = build_optimizer(model, OptimConfig(learning_rate=1e-3))
    with pytest.raises(CheckpointError, match=r"cannot load .*step_000002: ValueError: Size mismatch"):
        load(tmp_path / "step_000002", model, optimizer, ALONE)


@pytest.mark.parametrize(
    ("steps", "keep_last", "doomed"),
    [([10, 20, 30], 2, [10]), ([30, 10, 20], 1, [10, 20]), ([20, 30], 2, []), ([20, 30], 0, []), ([], 3, [])],
)
def test_retention_keeps_the_newest(steps, keep_last, doomed):
    assert to_delete(dict.fromkeys(steps), Keep(keep_last), newest=30) == doomed


@pytest.mark.parametrize(("keep_last", "doomed"), [(1, [10, 30, 40]), (2, [30, 40]), (0, [30, 40])])
def test_steps_of_an_abandoned_start_go_before_those_just_saved(keep_last, doomed):
    assert to_delete(dict.fromkeys([10, 20, 30, 40]), Keep(keep_last), newest=20) == doomed


def test_prune_deletes_older_complete_checkpoints(tmp_path):
    save_after_two_steps(ALONE, str(tmp_path))
    for later in (4, 6):
        shutil.copytree(tmp_path / "step_000002", tmp_path / f"step_{later:06d}")
    prune(tmp_path, Keep(2), newest=6)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000004", "step_000006"]


def test_random_state_continues_python_numpy_and_torch():
    state = random_state()
    expected = (random.random(), numpy.random.rand(), torch.rand(3).tolist())
    set_random_state(state)
    assert (random.random(), numpy.random.rand(), torch.rand(3).tolist()) == expected


def draw_after_load(dist: Dist, folder: str) -> tuple[list[float], list[float]]:
    """Random numbers drawn after a save, and those drawn after loading it."""
    model, optimizer = start(dist)
    torch.manual_seed(100 + dist.rank)
    path = save(Path(folder), 1, model, optimizer, {}, dist)
    drawn = torch.rand(3).tolist()
    load(path, model, optimizer, dist)
    return drawn, torch.rand(3).tolist()


def test_every_rank_continues_its_own_random_numbers(tmp_path):
    (first, first_again), (second, second_again) = run_ranks(draw_after_load, 2, str(tmp_path))
    assert (first_again, second_again) == (first, second)
    assert first != second


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 512 KiB; needs the right to mount."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("may not mount a tmpfs here")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_too_little_space_is_said_before_anything_is_written(small_disk):
    model, optimizer = start(ALONE)
    with pytest.raises(CheckpointError, match=r"it needs 8.0\d MiB and 0.\d+ MiB are free"):
        save(small_disk, 1, model, optimizer, {}, ALONE)
    assert list(small_disk.iterdir()) == []


def test_disk_that_fills_up_keeps_the_old_checkpoint_and_no_partial_one(small_disk, monkeypatch):
    monkeypatch.setattr(write, "HEADROOM_BYTES", 0)
    save_after_two_steps(ALONE, str(small_disk))
    model = nn.Linear(256, 256)  # 256 KiB and its optimizer state: passes for one tensor, not for what is written
    optimizer = torch.optim.SGD(model.parameters())
    (small_disk / "ballast").write_bytes(bytes(200 * 1024))
    with pytest.raises(CheckpointError):
        save(small_disk, 4, model, optimizer, {}, ALONE)
    assert newest_complete(small_disk) == small_disk / "step_000002"
    assert not (small_disk / ".tmp_step_000004").exists()


def test_state_file_is_json_of_step_world_size_and_extra(tmp_path):
    save_after_two_steps(ALONE, str(tmp_path))
    state = json.loads((tmp_path / "step_000002" / "state.json").read_text())
    assert sorted(state.pop("files")) == [".metadata", "__0_0.distcp", "random_0.pt"]
    assert state == {"format": 3, "step": 2, "world_size": 1, "data": {"row": 5}}


@pytest.mark.parametrize("resume", ["auto", "never", "elsewhere"])
@pytest.mark.parametrize("restarted", [False, True])
def test_restarted_run_goes_on_from_its_own_checkpoint_wherever_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: str, restarted: bool
) -> None:
    own, elsewhere = tmp_path / "run" / "checkpoints" / "step_000002", tmp_path / "other" / "step_000009"
    save_after_two_steps(ALONE, str(own.parent))
    elsewhere.parent.mkdir()
    shutil.copytree(own, elsewhere)
    if restarted:
        monkeypatch.setenv(RESTARTED_ENV, "1")
    config = Config(train=TrainConfig(resume=str(elsewhere) if resume == "elsewhere" else resume))
    first = {"auto": own, "never": None, "elsewhere": elsewhere}
    expected = own if restarted else first[resume]
    assert choose(config, tmp_path / "run", ALONE).paths == ([expected] if expected else [])
    elsewhere_only = {**first, "auto": None}[resume]
    assert choose(config, tmp_path / "new", ALONE).paths == ([elsewhere_only] if elsewhere_only else [])


def load_only_the_model(dist: Dist, path: str) -> list[torch.Tensor]:
    model, _ = start(dist)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    load_model(Path(path), model, dist)
    return [full(p) for p in model.parameters()]


@pytest.mark.parametrize(("saved_at", "loaded_at"), [(2, 1), (1, 3)])
def test_model_alone_loads_at_any_world_size(tmp_path, saved_at, loaded_at):
    run_ranks(save_after_two_steps, saved_at, str(tmp_path))
    expected = read_full(tmp_path / "step_000002")["model"]
    weights = run_ranks(load_only_the_model, loaded_at, str(tmp_path / "step_000002"))[0]
    assert all(
        torch.equal(a, expected[n]) for a, n in zip(weights, ["embed.weight", "mid.weight", "mid.bias"], strict=True)
    )


def test_full_state_is_model_and_optimizer_by_name_without_a_process_group(tmp_path):
    run_ranks(save_after_two_steps, 2, str(tmp_path))
    state = read_full(tmp_path / "step_000002")
    assert not torch.distributed.is_initialized()
    assert {name: list(tensor.shape) for name, tensor in state["model"].items()} == {
        "embed.weight": [7, 4],
        "head.weight": [7, 4],
        "mid.weight": [1, 4],
        "mid.bias": [1],
    }
    kept = {name: sorted(tensors) for name, tensors in state["optimizer"].items()}
    names = ("embed.weight", "mid.weight", "mid.bias")
    assert kept == {name: ["exp_avg", "exp_avg_sq", "step"] for name in names}
    assert state["optimizer"]["mid.bias"]["step"] == 2


@ROOT_ONLY
def test_checkpoints_that_cannot_be_listed_are_an_error() -> None:
    with public_folder(0o777) as folder:
        (folder / "checkpoints").mkdir(mode=0o000)
        with pytest.raises(CheckpointError) as refused:
            as_account(VICTIM, choose, Config(train=TrainConfig(resume="auto")), folder, ALONE)
    told = f"cannot list the checkpoints in {folder}/checkpoints: Permission denied. Make it readable, or start anew in"
    assert str(refused.value) == f"{told} another --run-dir"
