"""Trainings whose nodes are started by hand: two processes of train.py here, each a node or a task of srun."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.support.configs import SMALL_MODEL
from tests.support.ferry import REPO
from tests.support.limits import HANG_S
from tests.support.ranks import run_ranks
from tests.support.sshd import free_port
from tests.support.trainings import losses
from trainer.config.load import load_config
from trainer.dist import Dist
from trainer.recipes import sft

STEPS = 6


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("by_hand")
    pairs = [{"question": f"what is {n}?", "answer": "na " * (1 + n * n % 13) + str(n)} for n in range(60)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    sections = {
        "target": {"device": "cpu", "gpu_ranks": [0]},
        "model": SMALL_MODEL,
        "data": {"train": [str(folder / "rows.jsonl")], "seq_len": 96},
        "optim": {"learning_rate": 1e-2, "warmup_steps": 2},
        "train": {"steps": STEPS, "micro_batch_size": 2, "save_every": 0},
        "run": {"export": False, "dir": str(folder / "runs")},
    }
    (folder / "small.yaml").write_text(json.dumps(sections))  # JSON is YAML too
    return folder / "small.yaml"


@pytest.fixture(scope="module")
def expected(config, tmp_path_factory) -> list[float]:
    """The losses of two ranks on one node."""
    run_dir = tmp_path_factory.mktemp("expected")
    run_ranks(train_rank, 2, str(config), str(run_dir))
    return losses(read_records(run_dir))


def train_rank(dist: Dist, config: str, run_dir: str) -> None:
    sft.run(load_config(config), Path(run_dir), dist)


def read_records(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def environment(text: str) -> dict[str, str]:
    """This process's, with only these variables about nodes and ranks."""
    ours = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    return {**ours, "OMP_NUM_THREADS": "1", **dict(part.split("=") for part in text.split())}


@contextmanager
def started(*commands: tuple[dict[str, str], list[str]]):
    """The processes of train.py; those that still run at the end are killed, with their ranks."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with ExitStack() as stack:
        processes = []
        for env, words in commands:
            argv = [sys.executable, str(REPO / "train.py"), *words]
            process = stack.enter_context(subprocess.Popen(argv, env=env, start_new_session=True, **pipes))
            stack.callback(lambda process=process: process.poll() is None and os.killpg(process.pid, signal.SIGKILL))
            processes.append(process)
        yield processes


def two_nodes(port: int, *words: str, run_dir: Path | None = None) -> list[tuple[dict[str, str], list[str]]]:
    """Node 0 as a user starts it, and node 1 as a cloud's image sets its variables."""
    own = [*words, "--run-dir", str(run_dir)] if run_dir else [*words]
    where = f"MASTER_ADDR=127.0.0.1 MASTER_PORT={port}"
    return [
        (environment(f"NNODES=2 NODE_RANK=0 {where}"), own),
        (environment(f"WORLD_SIZE=2 RANK=1 {where}"), [*words]),
    ]


def test_two_nodes_have_the_losses_of_two_ranks_and_one_run_folder(config, expected):
    port = free_port()
    with started(*two_nodes(port, str(config))) as (first, second):
        outputs = [process.communicate(timeout=HANG_S) for process in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0), outputs
    assert [error for _, error in outputs] == ["", ""]
    (run,) = (config.parent / "runs").iterdir()
    assert json.loads((run / "outcome.json").read_text())["state"] == "succeeded"
    assert losses(read_records(run)) == pytest.approx(expected, abs=1e-5) and len(expected) == STEPS
    assert [record["step"] for record in read_records(run) if "loss" in record] == [*range(1, STEPS + 1)]
    assert f"node 0 of 2, meeting at 127.0.0.1:{port} (NODE_RANK=0 and NNODES=2)" in outputs[0][0].splitlines()
    assert any(line.startswith("2 nodes, 2 ranks: 1 on node 0 (") for line in outputs[0][0].splitlines())
    assert outputs[1][0].splitlines() == [
        f"node 1 of 2, meeting at 127.0.0.1:{port} "
        "(RANK=1 and WORLD_SIZE=2 count nodes here, as no launcher started this process)",
        f"run folder: {run}",
    ]


@pytest.mark.parametrize("interrupted", [0, 1])
def test_ctrl_c_on_one_node_saves_and_stops_both(config, tmp_path, interrupted):
    nodes = two_nodes(free_port(), str(config), "train.steps=100000", run_dir=tmp_path / "run")
    with started(*nodes) as processes:
        next(line for line in processes[0].stdout if line.startswith("step 1/"))
        os.killpg(processes[interrupted].pid, signal.SIGINT)
        errors = [process.communicate(timeout=HANG_S)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    assert errors == ["", ""]
    assert json.loads((tmp_path / "run" / "outcome.json").read_text())["state"] == "stopped"
    assert list((tmp_path / "run" / "checkpoints").glob("step_*/COMPLETE"))


def test_killed_rank_is_named_by_the_other_node(config, tmp_path):
    nodes = two_nodes(free_port(), str(config), "train.steps=100000", run_dir=tmp_path / "run")
    with started(*nodes) as (first, second):
        next(line for line in first.stdout if line.startswith("step 1/"))
        (rank,) = Path(f"/proc/{second.pid}/task/{second.pid}/children").read_text().split()
        os.kill(int(rank), signal.SIGKILL)
        told, said = (process.communicate(timeout=HANG_S)[1] for process in (first, second))
    assert (first.returncode, second.returncode) == (1, 137)
    assert re.search(r"^\[rank 0\] (rank 1 failed: Error: rank 1 was ended by SIGKILL|Error: rank 1 )", told), told
    assert said.startswith("Error: rank 1 was ended by SIGKILL\n")


def test_tasks_of_srun_train_together(config, expected, tmp_path):
    job = (
        f"SLURM_JOB_ID={free_port()} SLURM_STEP_ID=0 SLURM_NODEID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NUM_NODES=1 "
        "SLURM_STEP_TASKS_PER_NODE=2 SLURM_STEP_NODELIST=localhost"
    )
    words = [str(config), "--run-dir", str(tmp_path)]
    tasks = [(environment(f"{job} SLURM_PROCID={task} SLURM_LOCALID={task}"), words) for task in (0, 1)]
    with started(*tasks) as processes:
        outputs = [process.communicate(timeout=HANG_S) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert outputs[0][0].startswith("2 ranks, one for each task of srun, meeting at localhost:")
    assert losses(read_records(tmp_path)) == pytest.approx(expected, abs=1e-5)
