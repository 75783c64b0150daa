"""A home that several hosts share: each judges and stops only jobs of its own, and shows the others as theirs."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deployer.agent.host.layout import Job
from deployer.agent.job.status import FINAL, Status, read_status
from tests.agent.job.hosts import SharedHost, start_hosts
from tests.support.ferry import Ferry
from tests.support.jobs import said, wait_for

GO = "import os, time\nprint('up on', os.uname().nodename)\nwhile not os.path.exists('go'): time.sleep(0.02)"


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[SharedHost]]:
    with start_hosts(tmp_path_factory.mktemp("hosts"), 3) as running:
        yield running


def written(job: Job) -> Status:
    status = read_status(job)
    assert status is not None
    return status


def written_pid(job: Job) -> int:
    supervisor = written(job).supervisor
    assert supervisor is not None
    return supervisor.pid


class Site:
    """One user's client, one root folder, three hosts with a job each; `jobs` by host name."""

    def __init__(self, ferry: Ferry, hosts: list[SharedHost]) -> None:
        self.ferry = ferry
        self.hosts = {host.name: host for host in hosts}
        ferry.env["TORCHFERRY_SSH_CONFIG"] = str(hosts[0].config)
        self.jobs = {host.name: self.launch(host.name) for host in hosts}

    def where(self, name: str) -> list[str]:
        return ["--ssh", self.hosts[name].ssh, "--remote-root", str(self.ferry.root)]

    def launch(self, name: str) -> Job:
        before = set(self.ferry.job_ids())
        words = ("run", *self.where(name), "--detach", "--name", "same", "--python", sys.executable)
        done = self.ferry.run(*words, "--", "python", "-uc", GO)
        assert done.returncode == 0, done.stderr.decode()
        (job_id,) = set(self.ferry.job_ids()) - before
        job = Job(str(self.ferry.job(job_id)))
        said(job, f"up on {name}")
        return job

    def ps(self, name: str) -> dict[str, tuple[str, str | None]]:
        """State and other host of every job, by the host that it runs on, as this one lists them."""
        rows = {row["id"]: row for row in json.loads(self.ferry.run("ps", "--json", *self.where(name)).stdout)}
        return {host: (rows[job.id]["state"], rows[job.id]["on_host"]) for host, job in self.jobs.items()}


@pytest.fixture
def site(ferry: Ferry, hosts: list[SharedHost]) -> Iterator[Site]:
    running = Site(ferry, hosts)
    yield running
    for job in running.jobs.values():
        (Path(job.code) / "go").touch()
    wait_for(lambda: all(written(job).state in FINAL for job in running.jobs.values()))


def test_each_host_judges_its_own_jobs_and_names_the_others_hosts(site: Site) -> None:
    others = {name: ("running", name) for name in site.jobs}
    for name in site.jobs:
        assert site.ps(name) == {**others, name: ("running", None)}
    dead = site.jobs["gpu1"]
    supervisor = written_pid(dead)
    os.kill(supervisor, signal.SIGKILL)
    assert site.ps("gpu2")["gpu1"] == ("running", "gpu1")  # gpu2 cannot know, and must neither judge nor adopt
    assert written_pid(dead) == supervisor
    assert site.ps("gpu1")["gpu1"] == ("running", None)
    wait_for(lambda: written_pid(dead) != supervisor)  # gpu1 adopted it


def test_job_of_another_host_can_be_read_and_is_not_stopped(site: Site) -> None:
    job = site.jobs["gpu1"]
    logs = site.ferry.run("logs", job.id, "--no-follow", *site.where("gpu2"))
    assert logs.stdout == b"up on gpu1\n"
    refused = site.ferry.run("stop", job.id, *site.where("gpu2"))
    assert refused.returncode == 125
    assert b"runs on host gpu1, and this is host gpu2" in refused.stderr and b"--ssh gpu1" in refused.stderr
    assert not Path(job.stop).exists()
    every = site.ferry.run("stop", "--all", "--yes", "--grace", "5", *site.where("gpu2"))
    assert every.returncode == 0 and f"{job.id} runs on host gpu1".encode() in every.stderr
    assert site.ps("gpu1") == {"gpu1": ("running", None), "gpu2": ("stopped", None), "gpu3": ("running", "gpu3")}


def test_ps_of_all_hosts_lists_each_job_once_at_its_own_host(site: Site) -> None:
    (Path(site.jobs["gpu3"].code) / "go").touch()
    wait_for(lambda: written(site.jobs["gpu3"]).state == "succeeded")
    rows = json.loads(site.ferry.run("ps", "--json").stdout)
    found = {row["id"]: (row["state"], row["where"]) for row in rows if row["where"] != "this machine"}
    ssh = {name: host.ssh for name, host in site.hosts.items()}
    assert found == {
        site.jobs["gpu1"].id: ("running", ssh["gpu1"]),
        site.jobs["gpu2"].id: ("running", ssh["gpu2"]),
        site.jobs["gpu3"].id: ("succeeded", ssh["gpu3"]),
    }
    assert len([row for row in rows if row["id"] in found]) == 3
