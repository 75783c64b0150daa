"""Files of the client in a job's folder: where they may lie, and what a broken or repeated push leaves."""

import json
import os

import pytest

from tests.support.cutproxy import CutProxy
from tests.support.jobs import wait_for
from tests.support.limits import PATIENCE

WAITS = "import os, time, pathlib\nrun = pathlib.Path(os.environ['TORCHFERRY_RUN_DIR'])\n"
WAITS += "while not (run / 'go.txt').exists(): time.sleep(0.05)\nprint((run / 'go.txt').read_text())\n"


@pytest.fixture
def job(ferry):
    """A job that has ended."""
    assert ferry.run("run", *ferry.where(), "--no-pull", "--", "true").returncode == 0
    return ferry.job()


def test_pushed_file_reaches_a_program_that_runs(ferry):
    ferry.write("waits.py", WAITS)
    following = ferry.start("run", *ferry.where(), "--no-pull", "--", "python", "waits.py")
    try:
        wait_for(lambda: ferry.job_ids() and (ferry.job() / "status.json").exists())
        ferry.write("go.txt", "now")
        pushed = ferry.run("push", *ferry.where(), ferry.job_ids()[0], "go.txt")
        assert pushed.returncode == 0, pushed.stderr.decode()
        out, _ = following.communicate(timeout=60 * PATIENCE)
        assert (out, following.returncode) == (b"now\n", 0)
    finally:
        following.kill()


def test_folders_keep_their_shape_and_a_second_push_sends_nothing(ferry, job):
    inputs = ferry.project / "inputs"
    (inputs / "deep").mkdir(parents=True)
    (inputs / "a.bin").write_bytes(os.urandom(3_000_000))
    (inputs / "same.bin").write_bytes((inputs / "a.bin").read_bytes())
    (inputs / "deep" / "empty").touch()
    (inputs / "run.sh").write_text("#!/bin/sh\n")
    (inputs / "run.sh").chmod(0o755)
    (inputs / "link").symlink_to("a.bin")
    words = ("push", *ferry.where(), job.name, "inputs", "--into", "extra", "--json")
    first = json.loads(ferry.run(*words).stdout)
    assert (first["written"], first["there"], first["left_out"]) == (4, 0, ["inputs/link"])
    for name in ("a.bin", "same.bin", "deep/empty", "run.sh"):
        assert (job / "extra" / "inputs" / name).read_bytes() == (inputs / name).read_bytes()
    assert os.access(job / "extra" / "inputs" / "run.sh", os.X_OK)
    assert not [path for path in job.iterdir() if path.name.startswith(".push")]
    again = json.loads(ferry.run(*words).stdout)
    assert (again["written"], again["there"]) == (0, 4)


@pytest.mark.parametrize(
    "name", ["code", "status.json", "metrics.jsonl", "samples.jsonl", "logs", ".hidden", "job.json"]
)
def test_what_torchferry_keeps_is_not_written(ferry, job, name):
    (ferry.project / "inputs").mkdir()
    (ferry.project / "inputs" / name).write_text("mine")
    before = {path: path.stat().st_mtime_ns for path in job.rglob("*")}
    refused = ferry.run("push", *ferry.where(), job.name, f"inputs/{name}")
    assert refused.returncode == 2 and b"not for pushed files" in refused.stderr
    inside = ferry.run("push", *ferry.where(), job.name, f"inputs/{name}", "--into", "code")
    assert inside.returncode == 2 and b"not for pushed files" in inside.stderr
    assert {path: path.stat().st_mtime_ns for path in job.rglob("*")} == before


@pytest.mark.parametrize("into", ["..", "a/../../b", "/tmp", "link/x"])
def test_nothing_is_written_outside_the_jobs_folder(ferry, job, tmp_path, into):
    (tmp_path / "elsewhere").mkdir()
    (job / "link").symlink_to(tmp_path / "elsewhere")
    ferry.write("file", "mine")
    refused = ferry.run("push", *ferry.where(), job.name, "file", "--into", into)
    assert refused.returncode == 2 and b"Traceback" not in refused.stderr, refused.stderr.decode()
    assert not any((tmp_path / "elsewhere").iterdir())


def test_other_content_is_written_over_with_force_alone(ferry, job):
    (job / "settings.txt").write_text("the job's own")
    ferry.write("settings.txt", "mine")
    refused = ferry.run("push", *ferry.where(), job.name, "settings.txt")
    assert refused.returncode == 2 and b"--force writes over it" in refused.stderr
    assert (job / "settings.txt").read_text() == "the job's own"
    assert ferry.run("push", *ferry.where(), job.name, "settings.txt", "--force").returncode == 0
    assert (job / "settings.txt").read_text() == "mine"
    (job / "folder").mkdir()
    ferry.write("folder", "a file")
    assert b"a folder" in ferry.run("push", *ferry.where(), job.name, "folder", "--force").stderr


def test_missing_file_unknown_job_and_two_of_one_name_are_told(ferry, job):
    assert b"nothing.txt does not exist" in ferry.run("push", *ferry.where(), job.name, "nothing.txt").stderr
    for folder in ("a", "b"):
        (ferry.project / folder).mkdir()
        (ferry.project / folder / "same").touch()
    twice = ferry.run("push", *ferry.where(), job.name, "a/same", "b/same")
    assert twice.returncode == 2 and b"would be same twice" in twice.stderr
    assert ferry.run("push", *ferry.where(), "nosuchjob", "a/same").returncode == 2


def test_push_goes_on_over_connections_that_break(remote, server, tmp_path):
    """Through a proxy that cuts: files that came whole before a cut are not sent again."""
    assert remote.run("run", *remote.where(), "--no-pull", "--", "true").returncode == 0
    job, inputs = remote.job(), remote.project / "inputs"
    inputs.mkdir()
    for number in range(6):
        (inputs / f"{number}.bin").write_bytes(os.urandom(4_000_000))
    with CutProxy(server, cuts=3, largest=15_000, seed=7) as proxy:
        remote.env["TORCHFERRY_SSH_CONFIG"] = str(proxy.client_config(tmp_path))
        pushed = remote.run("push", *remote.where(), job.name, "inputs", "--json")
        assert (pushed.returncode, proxy.made) == (0, 3), pushed.stderr.decode()
    assert json.loads(pushed.stdout)["there"] > 0
    for number in range(6):
        assert (job / "inputs" / f"{number}.bin").read_bytes() == (inputs / f"{number}.bin").read_bytes()
