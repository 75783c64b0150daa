"""Locks between processes: whoever has a job's lock has the one that others wait for."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

from deployer.agent.host.layout import Root
from deployer.agent.host.locks import is_held, locked


def test_lock_of_a_job_that_was_removed_meanwhile_is_taken_anew(tmp_path: Path) -> None:
    job, has_it, let_go = Root(str(tmp_path)).job("j"), threading.Event(), threading.Event()

    def wait() -> None:
        with locked(job):
            has_it.set()
            let_go.wait(60)

    with locked(job):
        waiter = threading.Thread(target=wait)
        waiter.start()
        assert not has_it.wait(0.3)
        shutil.rmtree(job.path)
    assert has_it.wait(60)
    assert is_held(job.lock), "nobody else gets it meanwhile"
    let_go.set()
    waiter.join(60)
    assert not is_held(job.lock)
