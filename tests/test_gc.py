"""What `gc` removes, and that it never takes what a job, a launch or a process still needs."""

from __future__ import annotations

import multiprocessing
import threading
from pathlib import Path

import pytest

from deployer.agent.errors import AgentError
from deployer.agent.layout import Root
from deployer.agent.storelock import hold_agent, is_held, store_alone, store_in_use


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root(str(tmp_path / "root"))


# --- locks ------------------------------------------------------------------------------------------------------------


def test_launches_share_the_store_and_a_collection_waits_for_them(root: Root) -> None:
    with store_in_use(root), store_in_use(root):
        with pytest.raises(AgentError, match="a launch is under way"), store_alone(root, wait_s=0):
            pass
    with store_alone(root, wait_s=0):
        pass


def test_a_launch_waits_until_the_collection_is_over(root: Root) -> None:
    order: list[str] = []

    def launch() -> None:
        with store_in_use(root):
            order.append("launched")

    thread = threading.Thread(target=launch)
    with store_alone(root):
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        order.append("collected")
    thread.join(30)
    assert order == ["collected", "launched"]


def test_an_agent_s_folder_is_held_as_long_as_its_process_lives(tmp_path: Path) -> None:
    assert not is_held(str(tmp_path))
    agent = multiprocessing.get_context("fork").Process(target=hold_agent, args=(str(tmp_path),))
    agent.start()
    agent.join(30)
    assert not is_held(str(tmp_path))
    held = hold_agent(str(tmp_path))
    assert held is not None and is_held(str(tmp_path))
