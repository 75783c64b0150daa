"""`exec` and `shell` beside a job have its environment, and are no part of it."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import sys
import time
from pathlib import Path

import pytest

from deployer.agent.host.layout import BESIDE_ENV, Job
from deployer.agent.host.marks import ProcessSnapshot
from deployer.agent.requests.beside import Beside
from tests.support.ferry import Ferry
from tests.support.jobs import wait_for
from tests.support.limits import HANG_S

PROGRAM = """
import json, os, time
folder = os.environ["TORCHFERRY_RUN_DIR"]
with open(folder + "/env.new", "w") as f:
    json.dump(dict(os.environ), f)
os.rename(folder + "/env.new", folder + "/env.json")
while not os.path.exists(folder + "/enough"):
    time.sleep(0.05)
"""
SHOW = "import json, os, sys; print(json.dumps([dict(os.environ), sys.executable, os.getcwd()]))"


@pytest.fixture
def running(remote: Ferry) -> Ferry:
    """A job that runs until `enough` is in its folder, with a value and a secret of its own."""
    remote.write("wait.py", PROGRAM)
    remote.env["TF_TEST_TOKEN"] = "a secret"
    words = ("--python", sys.executable, "--device", "cpu", "--env", "VALUE=a b'", "--secret", "TF_TEST_TOKEN")
    done = remote.run("run", *remote.where(), *words, "--detach", "--name", "waits", "--", "python", "wait.py")
    assert done.returncode == 0, done.stderr.decode()
    wait_for(lambda: (remote.job() / "env.json").exists())
    return remote


def test_command_beside_a_job_has_its_environment_and_is_none_of_its_processes(running):
    folder = running.job()
    shown = running.run("exec", "waits", "--", "python", "-c", SHOW)
    env, python, cwd = json.loads(shown.stdout)
    ranks = json.loads((folder / "env.json").read_text())
    same = ("VALUE", "TF_TEST_TOKEN", "TORCHFERRY_RUN_DIR", "TORCHFERRY_JOB_ID", "CUDA_VISIBLE_DEVICES")
    assert {name: env[name] for name in same} == {name: ranks[name] for name in same}
    assert (python, cwd) == (sys.executable, str(folder / "code"))
    assert env["PATH"].split(":")[0] == str(Path(sys.executable).parent)
    assert env.get("VIRTUAL_ENV") == (sys.prefix if sys.prefix != sys.base_prefix else env.get("VIRTUAL_ENV"))

    del running.env["TF_TEST_TOKEN"]  # a value that this shell lacks is nowhere else
    bare, without = (
        json.loads(running.run("exec", "waits", *more, "--", sys.executable, "-c", SHOW).stdout)[0]
        for more in (["--bare"], [])
    )
    assert not {"VALUE", "TORCHFERRY_RUN_DIR", "TF_TEST_TOKEN"} & bare.keys()
    assert "VALUE" in without and "TF_TEST_TOKEN" not in without
    assert "a secret" not in "".join(
        path.read_text(errors="replace") for path in folder.glob("*.json") if path.name != "env.json"
    )

    left = running.run("exec", "waits", "--", "sh", "-c", "sleep 3600 >/dev/null 2>&1 & echo $!")
    pid = int(left.stdout)
    try:
        assert pid not in [process.pid for process in ProcessSnapshot().of(Job(str(folder))).all]
        assert running.run("stop", "waits", "--grace", "0").returncode == 0
        os.kill(pid, 0)
    finally:
        os.kill(pid, signal.SIGKILL)


def test_shell_beside_a_job_has_its_environment(running):
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(running.project)
        os.execve(sys.executable, running.argv("shell", "waits"), {**running.environment(), "TERM": "dumb"})
    try:
        asked = 'echo "[$VALUE|$TF_TEST_TOKEN|$(pwd)|$(command -v python)]"; exit 7\n'
        python = Path(sys.executable).parent / "python"
        assert f"[a b'|a secret|{running.job() / 'code'}|{python}]" in _converse(terminal, asked.encode())
    finally:
        (running.job() / "enough").touch()
        os.close(terminal)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert not list((running.root / "tmp").glob("enter-*"))


def _converse(terminal: int, asked: bytes) -> str:
    """What a shell says to its end. It is asked again after two seconds of silence: a terminal drops what comes while
    it changes its mode."""
    said, deadline = b"", time.monotonic() + HANG_S
    while time.monotonic() < deadline:
        if not select.select([terminal], [], [], 2)[0]:
            os.write(terminal, asked)
            continue
        try:
            said += os.read(terminal, 1 << 16)
        except OSError:  # it has ended
            break
    return said.decode().replace("\r", "")


@pytest.mark.parametrize(
    ("words", "argv"),
    [
        (["python", "a.py"], ["/opt/x/bin/python3.12", "a.py"]),
        (["python3.8"], ["/opt/x/bin/python3.12"]),
        (["pythonic", "python"], ["pythonic", "python"]),
    ],
)
def test_python_means_the_job_s_interpreter(words, argv):
    assert Beside({BESIDE_ENV: "/x"}, "/opt/x/bin/python3.12").argv(words) == argv
