"""The process that writes checkpoints: the same bytes, what its death costs, and how it ends."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.support.limits import HANG_S
from tests.support.ranks import FORKED, forked_saver, run_ranks
from tests.support.saves import begin, start, step
from tests.support.tiny import ALONE
from tests.support.trainings import build
from trainer.checkpoint.errors import CheckpointError
from trainer.checkpoint.folders import Manifest, damages, newest_complete
from trainer.checkpoint.load import read_info
from trainer.dist import Dist
from trainer.run_folder import acquire_run_folder, release_all
from trainer.saver.process import Launched, launch_saver
from trainer.saver.writer import AsyncSave, Writer
from trainer.train import loop
from trainer.train.saves import Saver
from trainer.train.step import train_step


def save_in_both_ways(dist: Dist, folder: str) -> tuple[Manifest, Manifest]:
    """The files of a save beside the training and of one by the trainer itself."""
    model, optimizer = start(dist)
    step(model, optimizer)
    found = []
    for beside in (FORKED, None):
        writer = Writer(dist, beside=beside)
        begin(writer, folder, 1, model, optimizer)
        found.append(read_info(writer.result().path).files)
        writer.close()
    return found[0], found[1]


@pytest.mark.parametrize("ranks", [1, 3])
def test_saver_writes_bit_for_bit_what_the_trainer_would(tmp_path, ranks):
    beside, alone = run_ranks(save_in_both_ways, ranks, str(tmp_path), savers=True)[0]
    del beside[".metadata"], alone[".metadata"]  # holds a random id
    assert len(beside) == 2 * ranks
    assert beside == alone


def lose_a_saver(dist: Dist, folder: str, point: str) -> tuple[str, bool, str]:
    """Kill the last rank's saver at a point of a save; what is told, whether the next save is synchronous, its note."""
    model, optimizer = start(dist)
    step(model, optimizer)
    pids: list[int] = []

    def launch() -> Launched:
        launched = forked_saver()
        pids.append(launched.pid)
        return launched

    def at(name: str) -> None:
        if name == point and dist.rank == dist.world_size - 1 and pids:
            os.kill(pids.pop(), signal.SIGKILL)

    writer = Writer(dist, beside=replace(FORKED, launch=launch), on_stage=at)
    begin(writer, folder, 1, model, optimizer)
    told = ""
    try:
        writer.result()
    except CheckpointError as error:
        told = str(error)
    begin(writer, folder, 2, model, optimizer)
    ended, note = writer.has_ended(), writer.result().note
    writer.close()
    return told, ended, note


@pytest.mark.parametrize("point", ["begun", "shards"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_saver_that_dies_in_a_save_is_told_on_all_ranks_which_write_themselves_from_then_on(tmp_path, ranks, point):
    results = run_ranks(lose_a_saver, ranks, str(tmp_path), point, savers=True)
    assert len(set(results)) == 1
    told, ended, note = results[0]
    assert f"cannot write the checkpoint {tmp_path}/step_000001: the saver process of rank" in told
    assert told.endswith("; saves stop the training from now on")
    assert (ended, note) == (True, "")
    assert [path.name for path in tmp_path.iterdir()] == ["step_000002"]


def test_signal_that_ended_a_saver_is_named(tmp_path):
    told, _, _ = lose_a_saver(ALONE, str(tmp_path), "shards")
    assert "the saver process of rank 0 was ended by signal 9" in told


def test_saver_that_is_gone_before_a_save_costs_no_checkpoint(tmp_path):
    model, optimizer = start(ALONE)
    launched = forked_saver()
    writer = Writer(ALONE, beside=replace(FORKED, launch=lambda: launched))
    writer.prepare(model, optimizer)
    while not writer.is_ready():
        os.sched_yield()
    launched.end()
    begin(writer, tmp_path, 1, model, optimizer)
    assert writer.has_ended()
    assert (
        writer.result().note == "the saver process of rank 0 was ended by signal 9: saves stop the training from now on"
    )
    assert newest_complete(tmp_path) == tmp_path / "step_000001"
    writer.close()


def save_where_the_last_saver_does_not_start(dist: Dist, folder: str) -> tuple[bool, str]:
    def launch() -> Launched:
        if dist.rank == dist.world_size - 1:
            raise OSError("no more processes")
        return forked_saver()

    writer = Writer(dist, beside=replace(FORKED, launch=launch))
    begin(writer, folder, 1, *start(dist))
    ended, note = writer.has_ended(), writer.result().note
    writer.close()
    return ended, note


@pytest.mark.parametrize("ranks", [1, 2])
def test_saver_that_cannot_be_started_costs_no_checkpoint_and_nobody_waits_for_it(tmp_path, ranks):
    (ended, note), *_ = run_ranks(save_where_the_last_saver_does_not_start, ranks, str(tmp_path), savers=True)
    assert ended
    assert f"saver process of rank {ranks - 1} could not be started: no more processes: saves stop the training" in note
    assert newest_complete(tmp_path) == tmp_path / "step_000001"


def test_last_save_of_a_run_is_made_again_when_its_saver_dies(rows, tmp_path, capfd):
    run = build(rows, tmp_path, backend="pytorch", steps=2, save_every=1, eval_every=0)
    launched = forked_saver()

    def at(point: str) -> None:
        if point == "random" and (tmp_path / "checkpoints" / "step_000001").exists():
            launched.end()

    loop.train(run, on_stage=at, beside=replace(FORKED, launch=lambda: launched))
    assert "was ended by signal 9" in (told := capfd.readouterr().out)
    assert "it is saved again" in told
    path = newest_complete(tmp_path / "checkpoints")
    assert path.name == "step_000002"
    assert damages(path, read_info(path).files) == []


def hear_of_a_lost_saver(dist: Dist, rows: str, folder: str) -> tuple[bool, bool]:
    """Whether a second save would go beside the training, on a rank that hears late that a saver died in the first."""
    run = build(rows, Path(folder), dist, backend="fsdp", steps=9, save_every=1, eval_every=0)
    launched = forked_saver()

    def at(point: str) -> None:
        if point == "begun" and dist.rank == 1:
            time.sleep(0.5)
            launched.end()

    saver = Saver(run, on_stage=at, beside=replace(FORKED, launch=lambda: launched))
    train_step(run, 0, lr=0.0)
    saver.save(1, must_succeed=False)
    is_async = saver.is_async()
    saver.finish()
    return is_async, saver.is_async()


def test_ranks_agree_on_the_next_save_though_they_hear_of_a_lost_saver_at_different_moments(rows, tmp_path):
    assert run_ranks(hear_of_a_lost_saver, 2, rows, str(tmp_path), savers=True) == [(False, False)] * 2


def test_small_state_does_not_wait_for_a_saver_that_is_not_up(tmp_path):
    ours, theirs = socket.socketpair()
    silent = Launched(Connection(ours.detach()), 0, lambda: theirs.close() or "")
    writer = Writer(ALONE, beside=AsyncSave(launch=lambda: silent))
    begin(writer, tmp_path, 1, *start(ALONE))
    assert writer.has_ended()
    assert writer.result().note == ""
    writer.close()


@pytest.fixture
def launched():
    """A saver as a run starts it."""
    saver = launch_saver()
    yield saver
    saver.end()
    saver.connection.close()


def test_run_saves_through_a_process_of_its_own_that_sees_no_gpu_and_heeds_no_signal(rows, tmp_path, launched):
    environment = Path(f"/proc/{launched.pid}/environ").read_text().split("\0")
    assert "CUDA_VISIBLE_DEVICES=" in environment
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(launched.pid, number)
    run = build(rows, tmp_path, backend="pytorch", steps=2, save_every=1, eval_every=0)
    loop.train(run, beside=AsyncSave(launch=lambda: launched, wait_from_bytes=0))
    path = newest_complete(tmp_path / "checkpoints")
    assert path.name == "step_000002"
    assert damages(path, read_info(path).files) == []


def test_run_folder_is_in_use_as_long_as_a_saver_lives(tmp_path):
    assert acquire_run_folder(tmp_path, patience_s=0) is None
    saver = launch_saver()
    release_all()  # as the end of the trainer does
    assert "in use by another run" in acquire_run_folder(tmp_path, patience_s=0)
    saver.end()
    assert acquire_run_folder(tmp_path, patience_s=0) is None
    release_all()


TRAINER = """
import sys
from trainer.saver.process import launch_saver
saver = launch_saver()
print(saver.pid, flush=True)
sys.stdin.read()
"""


def test_saver_ends_with_a_trainer_that_is_killed():
    with subprocess.Popen([sys.executable, "-c", TRAINER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as trainer:
        ended = os.pidfd_open(int(trainer.stdout.readline()))
        trainer.kill()
    assert wait_for(ended)


def wait_for(process: int, *, seconds: float = HANG_S) -> bool:
    readable, _, _ = select.select([process], [], [], seconds)
    os.close(process)
    return bool(readable)
