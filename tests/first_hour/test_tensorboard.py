"""`tensorboard`: a real TensorBoard shows what a running job writes, here or on the host, and ends when we do."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.error import URLError

import pytest

from tests.support.ferry import Ferry
from tests.support.jobs import wait_for
from tests.support.limits import HANG_S
from tests.support.pythons import make_python

pytest.importorskip("tensorboard")

PROGRAM = """
import os, time
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter
folder = os.environ["TORCHFERRY_RUN_DIR"]
writer = EventFileWriter(folder + "/tensorboard")
for step in range(1, 3):
    summary = Summary(value=[Summary.Value(tag="loss", simple_value=step / 2)])
    writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))
    writer.flush()
    while not os.path.exists(folder + "/step_%d" % step):
        time.sleep(0.05)
writer.close()
"""


@contextmanager
def shown(ferry: Ferry, *words: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A TensorBoard, by its address; Ctrl-C ends it well, and nothing is left."""
    client = ferry.start("tensorboard", "curves", "--every", "1s", "--port", "0", *words, "--json")
    try:
        line = client.stdout.readline()
        assert line, client.communicate()[1].decode()
        url = json.loads(line)["url"]
        yield url, client
        client.send_signal(signal.SIGINT)
        assert client.wait(HANG_S) == 0
    finally:
        client.kill()
        client.communicate()
    wait_for(lambda: not _servers(ferry))


def _servers(ferry: Ferry) -> list[str]:
    """Processes that serve one of our folders."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if b"--logdir" in words and str(ferry.project.parent).encode() in b" ".join(words):
                found.append(path.parent.name)
    return found


def losses(url: str) -> list[float]:
    """The values of the curve, by its HTTP API."""
    address = f"{url}data/plugin/scalars/scalars?run=.&tag=loss"
    with suppress(URLError, OSError), urllib.request.urlopen(address, timeout=HANG_S) as answer:
        return [value for _, _, value in json.load(answer)]
    return []


@pytest.mark.parametrize("words", [(), ("--on-host",)])
def test_curve_of_a_running_job_grows_in_a_real_tensorboard(remote, words):
    remote.write("writes.py", PROGRAM)
    program = (
        "--python",
        sys.executable,
        "--device",
        "cpu",
        "--detach",
        "--name",
        "curves",
        "--",
        "python",
        "writes.py",
    )
    done = remote.run("run", *remote.where(), *program)
    assert done.returncode == 0, done.stderr.decode()
    with shown(remote, *words) as (url, _):
        wait_for(lambda: losses(url) == [0.5])
        (remote.job() / "step_1").touch()
        wait_for(lambda: losses(url) == [0.5, 1.0])
        (remote.job() / "step_2").touch()
    assert remote.run("logs", "curves", "-f").returncode == 0
    assert bool(list((remote.project / "results").rglob("*tfevents*"))) == (not words)


@pytest.mark.parametrize("words", [(), ("--on-host",)])
def test_job_without_event_files_is_told_how_to_write_some(remote, words):
    remote.run("run", *remote.where(), "--no-pull", "--name", "plain", "--", "true")
    done = remote.run("tensorboard", "plain", *words)
    assert done.returncode == 2 and b"run.trackers=[tensorboard]" in done.stderr, done.stderr.decode()


def test_host_without_tensorboard_says_so(remote, tmp_path):
    lacking = make_python(tmp_path / "bare")
    program = (
        "import os; d = os.environ['TORCHFERRY_RUN_DIR'] + '/tensorboard/run1'\n"
        "os.makedirs(d); open(d + '/x.tfevents.1', 'w')"
    )
    words = ("--python", lacking, "--no-pull", "--name", "bare", "--", "python", "-c", program)
    assert remote.run("run", *remote.where(), *words).returncode == 0
    done = remote.run("tensorboard", "bare", "--on-host")
    assert done.returncode == 125 and b"the job's Python has not got TensorBoard" in done.stderr, done.stderr.decode()
