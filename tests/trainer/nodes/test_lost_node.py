"""A node of two is killed or halted in mid-run: the other one ends in time, names it, and both go on at the next start.

All nodes run at once, because most of the time is silence that they wait for.
"""

from __future__ import annotations

import json
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.limits import patient
from tests.support.trainings import training_on
from tests.trainer.nodes.two_agents import Agent, descendants, is_running, two_agents, wait_for
from trainer.checkpoint.folders import steps_in
from trainer.config.load import config_to_yaml

WITHIN_S = 30
CASES = {
    "store killed": (0, signal.SIGKILL),
    "store halted": (0, signal.SIGSTOP),
    "other killed": (1, signal.SIGKILL),
    "other halted": (1, signal.SIGSTOP),
}


@dataclass(frozen=True)
class Lost:
    """What the surviving node did."""

    seconds: float
    log: str
    outcome: dict
    folder: Path


def lose(folder: Path, config: Path, lost: int, number: signal.Signals) -> Lost:
    folder.mkdir()
    with two_agents(folder, config) as agents:
        wait_for("checkpoint on both nodes", lambda: all(saved(agent) for agent in agents))
        survivor = agents[1 - lost]
        ranks = descendants(survivor.process.pid)
        agents[lost].signal_all(number)
        seconds = wait_for("end of the other node's ranks", lambda: not any(map(is_running, ranks)))
    return Lost(seconds, survivor.log.read_text(), json.loads((survivor.folder / "outcome.json").read_text()), folder)


def saved(agent: Agent) -> bool:
    assert agent.process.poll() is None, agent.log.read_text()
    return len(steps_in(agent.folder / "checkpoints")) > 0


@pytest.fixture(scope="module")
def config(rows, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("config") / "config.yaml"
    path.write_text(
        config_to_yaml(training_on(rows, steps=100_000, save_every=5, eval_every=0, keep_last=2, backend="fsdp"))
    )
    return path


@pytest.fixture(scope="module")
def lost(config, tmp_path_factory) -> dict[str, Lost]:
    folder = tmp_path_factory.mktemp("lost")
    with ThreadPoolExecutor(len(CASES)) as pool:
        jobs = {name: pool.submit(lose, folder / name.replace(" ", "_"), config, *case) for name, case in CASES.items()}
        return {name: job.result() for name, job in jobs.items()}


@pytest.mark.parametrize("name", CASES)
def test_node_that_is_left_ends_in_time_and_names_the_lost_one(lost, name):
    found = lost[name]
    assert found.seconds < patient(WITHIN_S)
    told = [line for line in found.log.splitlines() if line.startswith("[rank ") and "Error: " in line]
    assert len(told) == 1, found.log
    node = CASES[name][0]
    assert re.search(rf"node {node} \(\S+\) has been silent for 2\d s", told[0]), told[0]
    assert (found.outcome["state"], "has been silent" in found.outcome["error"]) == ("failed", True)


def test_both_nodes_go_on_at_the_next_start(lost, config):
    found = lost["store halted"]
    newest = min(max(steps_in(found.folder / name / "checkpoints")) for name in "ab")
    given = ("train.stop_after_steps=2", "run.name=again")
    with two_agents(found.folder, config, attempt=2, overrides=given) as agents:
        wait_for("end of both nodes", lambda: all(agent.process.poll() is not None for agent in agents))
        assert [agent.process.returncode for agent in agents] == [0, 0], [a.log.read_text() for a in agents]
        logs = "".join(agent.log.read_text() for agent in agents)
    assert f"resuming after step {newest}" in logs
    outcomes = [json.loads((found.folder / name / "outcome.json").read_text()) for name in "ab"]
    assert [(one["state"], one["steps"]) for one in outcomes] == [("stopped", newest + 2)] * 2
    assert [sorted(steps_in(found.folder / name / "checkpoints"))[-1] for name in "ab"] == [newest + 2] * 2
