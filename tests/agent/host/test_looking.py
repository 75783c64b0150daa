"""A look at all processes finds a job's also when they begin and end while it is taken."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from deployer.agent.host.layout import RUN_DIR_ENV, Root
from deployer.agent.host.marks import ProcessSnapshot
from tests.support.jobs import wait_for

FORKS = """
import os, sys, time
if os.fork():
    os._exit(0)  # and nobody reaps it
time.sleep(1000)
"""


def test_child_of_a_process_that_ended_before_it_was_read_is_found(tmp_path: Path) -> None:
    job = Root(str(tmp_path)).job("j")
    Path(job.path).mkdir(parents=True)
    snapshot = ProcessSnapshot()  # which has seen neither the program nor what it starts
    env = {**os.environ, RUN_DIR_ENV: os.path.realpath(job.path)}
    program = subprocess.Popen([sys.executable, "-c", FORKS], env=env)
    os.waitid(os.P_PID, program.pid, os.WEXITED | os.WNOWAIT)  # a zombie from now on
    (child,) = found = snapshot.of(job).others
    assert child.pid != program.pid
    os.kill(child.pid, signal.SIGKILL)
    program.wait()
    wait_for(lambda: ProcessSnapshot().of(job).all == [])
    assert found
