"""A run that is asked to stop during an evaluation or a save; a run folder that is taken; a disk that fills up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.limits import PATIENCE
from tests.support.ranks import run_ranks
from tests.support.tiny import ALONE
from tests.support.trainings import build, losses, training_on
from trainer.batch import Batch, LossSum
from trainer.checkpoint.errors import CheckpointError
from trainer.checkpoint.folders import damages, steps_in
from trainer.checkpoint.load import read_info
from trainer.dist import Dist
from trainer.recipes import sft
from trainer.run_folder import acquire_run_folder, acquire_shared, release_all
from trainer.train import loop

FIELDS = {"steps": 40, "save_every": 3, "eval_every": 2, "keep_last": 0, "micro_batch_size": 1}


def stop_in_evaluation(dist: Dist, rows: str, run_dir: str) -> tuple[int, bool, int]:
    """Ask the last rank to stop in the evaluation after step 2; (steps, stopped, evaluation batches after that)."""
    run = build(rows, Path(run_dir), dist, **FIELDS)
    loss_fn, seen = run.loss_fn, []

    def observed(module: torch.nn.Module, batch: Batch) -> LossSum:
        steps = len(list((Path(run_dir)).glob("metrics.jsonl")))
        if not module.training and run.dist.progress.step == 2 and steps:
            seen.append(1)
            if len(seen) == 1 and dist.rank == dist.world_size - 1:
                os.kill(os.getpid(), signal.SIGTERM)
        return loss_fn(module, batch)

    run.loss_fn = observed
    result = loop.train(run)
    return result.step, result.stopped, len(seen)


@pytest.mark.parametrize("ranks", [1, 2])
def test_sigterm_in_an_evaluation_ends_it_saves_and_stops(rows, tmp_path, ranks):
    results = run_ranks(stop_in_evaluation, ranks, rows, str(tmp_path))
    assert len(set(results)) == 1
    step, stopped, batches = results[0]
    assert stopped and step <= 4
    assert batches <= 2  # of six or more
    assert list(steps_in(tmp_path / "checkpoints"))[-1] == step


def stop_in_save(dist: Dist, rows: str, run_dir: str) -> tuple[int, bool]:
    """Ask rank 0 to stop while the save of step 3 is under way in its thread."""
    run = build(rows, Path(run_dir), dist, **FIELDS)

    def at(point: str) -> None:
        if point == "shards" and dist.is_main:
            os.kill(os.getpid(), signal.SIGTERM)

    result = loop.train(run, on_stage=at)
    return result.step, result.stopped


@pytest.mark.parametrize("ranks", [1, 2])
def test_sigterm_during_a_save_waits_for_it_saves_again_and_stops(rows, tmp_path, ranks):
    results = run_ranks(stop_in_save, ranks, rows, str(tmp_path))
    assert len(set(results)) == 1
    step, stopped = results[0]
    assert stopped and 3 <= step < 40
    assert {3, step} <= set(steps_in(tmp_path / "checkpoints"))


HOLDER = """
import sys, time
from pathlib import Path
from trainer.run_folder import acquire_run_folder
assert acquire_run_folder(Path(sys.argv[1])) is None
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """A process that has the run folder, until its input ends."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"held\n"
    yield process
    process.kill()
    process.wait()
    release_all()


def test_run_folder_in_use_names_the_process_that_has_it(tmp_path, holder):
    said = acquire_run_folder(tmp_path, patience_s=0)
    assert f"{tmp_path} is in use by another run (host {os.uname().nodename}, process {holder.pid})" in said


def test_run_folder_of_a_dying_run_is_waited_for(tmp_path, holder):
    assert acquire_run_folder(tmp_path, patience_s=0) is not None
    holder.kill()
    assert acquire_run_folder(tmp_path, patience_s=20 * PATIENCE) is None


def test_run_folder_is_in_use_as_long_as_another_rank_of_an_earlier_start_lives(tmp_path):
    acquire_shared(tmp_path)
    left = "a rank of a start whose rank 0 has ended"
    assert f"in use by another run ({left})" in acquire_run_folder(tmp_path, patience_s=0)
    release_all()
    assert acquire_run_folder(tmp_path, patience_s=0) is None
    release_all()
    acquire_shared(tmp_path)
    process = f"host {os.uname().nodename}, process {os.getpid()}"
    assert f"in use by another run ({left}: {process})" in acquire_run_folder(tmp_path, patience_s=0)
    release_all()
    assert acquire_run_folder(tmp_path, patience_s=0) is None
    acquire_shared(tmp_path)  # a rank of this start
    release_all()


def test_second_start_changes_nothing_in_a_folder_in_use(tmp_path, holder):
    (tmp_path / "config.yaml").write_text("of the first")
    (tmp_path / "control" / "stop.json").write_text("asked of the first")
    command = [sys.executable, "train.py", "configs/01_debug_sft.py", "target.device=cpu", "--run-dir", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as second:
        assert f"{tmp_path} is in use by another run" in second.stdout.readline()
        second.kill()
    assert (tmp_path / "config.yaml").read_text() == "of the first"
    assert (tmp_path / "control" / "stop.json").exists()


@pytest.fixture
def small_disk(tmp_path):
    """A run folder whose checkpoints lie on a file system of 12 MiB; needs the right to mount."""
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("may not mount a tmpfs here")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("beside", [True, False])
def test_disk_that_fills_up_is_told_with_figures_and_training_goes_on(rows, small_disk, capfd, beside):
    run = build(rows, small_disk.parent, backend="pytorch", **{**FIELDS, "steps": 9, "async_save": beside})

    def fill(point: str) -> None:
        if point == "pruned" and not (small_disk / "ballast").exists():
            (small_disk / "ballast").write_bytes(bytes(5 * 2**20))

    with pytest.raises(CheckpointError, match=r"it needs \d+.\d+ MiB and \d.\d+ MiB are free"):
        loop.train(run, on_stage=fill)  # the last save must succeed
    run.log.close()
    told = capfd.readouterr().out
    assert "MiB are free. Free some space, or lower train.keep_last; training goes on from memory" in told
    assert len(losses(read_records(small_disk.parent))) == 9
    (path,) = steps_in(small_disk).values()
    assert path.name == "step_000003"
    assert damages(path, read_info(path).files) == []
    assert list(small_disk.glob(".tmp*")) == []


def read_records(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_model_is_exported_though_the_disk_has_no_room_for_the_last_checkpoint(rows, small_disk, capfd):
    (small_disk / "ballast").write_bytes(bytes(5 * 2**20))
    config = training_on(rows, backend="pytorch", steps=3, save_every=0)
    config = replace(config, run=replace(config.run, export=True))
    with pytest.raises(CheckpointError, match=r"no room for a checkpoint in .*: it needs \d+.\d+ MiB"):
        sft.run(config, small_disk.parent, ALONE)
    assert "the model is exported all the same" in capfd.readouterr().out
    assert (small_disk.parent / "export" / "model.safetensors").exists()
    assert not (small_disk.parent / "outcome.json").exists()  # who catches the error writes it
