"""Locks between processes: whoever has a job's lock has the one that others wait for."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest

from deployer.agent.host.errors import AgentError
from deployer.agent.host.layout import Root
from deployer.agent.host.locks import is_held, locked


def test_lock_of_a_job_that_was_removed_meanwhile_is_taken_anew(tmp_path: Path) -> None:
    job, has_it, let_go = Root(str(tmp_path)).job("j"), threading.Event(), threading.Event()

    def wait() -> None:
        with locked(job, anew=True):
            has_it.set()
            let_go.wait(60)

    with locked(job, anew=True):
        waiter = threading.Thread(target=wait)
        waiter.start()
        assert not has_it.wait(0.3)
        shutil.rmtree(job.path)
    assert has_it.wait(60)
    assert is_held(job.lock), "nobody else gets it meanwhile"
    let_go.set()
    waiter.join(60)
    assert not is_held(job.lock)


def test_whoever_waits_for_a_job_that_is_collected_makes_no_other(tmp_path: Path) -> None:
    job, told = Root(str(tmp_path)).job("j"), []

    def wait() -> None:
        with pytest.raises(AgentError, match="no job j on this host") as refused, locked(job):
            pass
        told.append(refused.value.kind)

    with locked(job, anew=True):
        waiter = threading.Thread(target=wait)
        waiter.start()
        waiter.join(0.3)
        assert waiter.is_alive()
        shutil.rmtree(job.path)
    waiter.join(60)
    assert told == ["unknown_job"]
    assert not Path(job.path).exists()
