"""Launches whose connection is cut at a random byte, before or after the acknowledgement: one job or none, never 2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.cutproxy import CutProxy
from tests.support.ferry import Ferry
from tests.support.jobs import wait_for
from tests.support.sshd import ALIAS, SshServer

SEED = 42
LARGEST = 9_000
"""Bytes from the host: a login and an agent's first words are about as many, then comes the log."""
ONCE = 'echo once >> "$TORCHFERRY_RUN_DIR/count"; seq 2000'


def launch_cut(
    ferry: Ferry, server: SshServer, folder: Path, number: int, *, way: str, comes_back: bool = True
) -> tuple[int, list[str], list[str]]:
    """Exit code of one launch, the jobs that came of it, and those that the client's own notes name."""
    name = f"cut-{way}-{number}"
    follow = ["--detach"] if number % 2 else ["--no-pull"]
    with CutProxy(server, cuts=1, largest=LARGEST, seed=SEED + number, comes_back=comes_back) as proxy:
        ferry.env["TORCHFERRY_SSH_CONFIG"] = str(proxy.client_config(folder))
        words = ("run", *ferry.where(), "--transport", way, "--name", name, *follow, "--", "sh", "-c", ONCE)
        code = ferry.run(*words).returncode
    jobs = [job for job in ferry.job_ids() if job.startswith(f"{name}-")]
    noted = [path.stem for path in (ferry.state / "jobs").glob(f"{name}-*.json")]
    return code, jobs, noted


@pytest.mark.parametrize("way", ["fabric", "openssh"])
@pytest.mark.parametrize("launches", [4, pytest.param(100, marks=pytest.mark.soak)])
def test_launch_cut_at_a_random_byte_is_one_job_or_none_and_the_client_knows(ferry, server, tmp_path, launches, way):
    ferry.ssh = ALIAS
    for number in range(launches):
        code, jobs, noted = launch_cut(ferry, server, tmp_path, number, way=way)
        # a connection that never came about is the only way to no job
        assert (code, len(jobs)) in ((0, 1), (125, 0)) and noted == jobs, number
    for job in ferry.job_ids():
        wait_for(lambda job=job: json.loads((ferry.job(job) / "status.json").read_text())["state"] == "succeeded")
        assert (ferry.job(job) / "count").read_text() == "once\n"


@pytest.mark.parametrize("launches", [1, pytest.param(50, marks=pytest.mark.soak)])
def test_launch_cut_from_a_host_that_stays_away_is_one_job_or_none_and_is_noted(ferry, server, tmp_path, launches):
    ferry.ssh = ALIAS
    for number in range(1, 2 * launches, 2):
        code, jobs, noted = launch_cut(ferry, server, tmp_path, number, way="fabric", comes_back=False)
        # 75: it may have been started, so it is noted and `ps` asks that host for it
        assert (code, len(jobs)) in ((0, 1), (75, 0), (75, 1), (125, 0)), (number, code)
        assert set(jobs) <= set(noted) and (code == 75 or noted == jobs), number


@pytest.mark.parametrize("resumes", [4, pytest.param(50, marks=pytest.mark.soak)])
def test_resume_cut_at_a_random_byte_starts_its_attempt_once_or_not(ferry, server, tmp_path, resumes):
    ferry.ssh = ALIAS
    ferry.env["TORCHFERRY_SSH_CONFIG"] = str(server.client_config_path)
    assert ferry.run("run", *ferry.where(), "--no-pull", "--", "sh", "-c", ONCE).returncode == 0
    (job_id,) = ferry.job_ids()
    attempts = 1
    for number in range(resumes):
        follow = "--detach" if number % 2 else "--no-pull"
        with CutProxy(server, cuts=2, largest=LARGEST, seed=SEED + number) as proxy:
            ferry.env["TORCHFERRY_SSH_CONFIG"] = str(proxy.client_config(tmp_path))
            code = ferry.run("resume", job_id, follow).returncode
        wait_for(lambda: json.loads((ferry.job() / "status.json").read_text())["state"] == "succeeded")
        before, attempts = attempts, json.loads((ferry.job() / "status.json").read_text())["attempt"]
        assert attempts - before == (1 if code == 0 else 0) or code == 75, (number, code)
        assert (ferry.job() / "count").read_text() == "once\n" * attempts
