"""`forget` drops what this client has noted, asks no host, and lets nothing that may run go in silence."""

from __future__ import annotations

import json

from deployer.agent.job.views import Row
from deployer.jobs.registry import JobRecord, SeenJob, remember_rows, stamp, write_record
from tests.support.ferry import Ferry

GONE = "root@gone.invalid:22"
ROOT = "/nowhere/.torchferry"


def ids(ferry: Ferry, *words: str) -> list[str]:
    done = ferry.run("ps", "--all", "--json", *words)
    return [row["id"] for row in json.loads(done.stdout)]


def note(ferry: Ferry, monkeypatch, *states: str) -> None:
    """Jobs of a host that nobody can reach any more, as a launch and a look leave them."""
    monkeypatch.setenv("TORCHFERRY_STATE_DIR", str(ferry.state))
    rows = []
    for number, state in enumerate(states):
        job_id = f"old-{number}"
        write_record(JobRecord(job_id, "old", GONE, ROOT, "2026-11-30T00:00:00+00:00", ""))
        rows.append(SeenJob(Row(job_id, state, name="old"), GONE, stamp()))
    remember_rows(GONE, ROOT, rows)


def test_ended_job_is_forgotten_here_and_stays_on_its_host(ferry: Ferry) -> None:
    assert ferry.run("run", *ferry.where(), "--name", "one", "--", "true").returncode == 0
    (job_id,) = ferry.job_ids()
    done = ferry.run("forget", "one")
    assert (
        done.returncode == 0
        and f"{job_id} is forgotten here; on this machine it stays as it is" in done.stderr.decode()
    )
    assert ferry.run("status", job_id).returncode == 2, "nothing is known of it"
    assert ferry.job(job_id).is_dir() and ids(ferry, *ferry.where()) == [job_id]


def test_job_that_may_run_is_forgotten_only_on_request(ferry: Ferry) -> None:
    assert ferry.run("run", *ferry.where(), "--detach", "--name", "runs", "--", "sleep", "1000").returncode == 0
    (job_id,) = ferry.job_ids()
    refused = ferry.run("forget", job_id)
    assert refused.returncode == 2 and f"{job_id} may still run, and goes on" in refused.stderr.decode()
    assert f"deploy.py stop {job_id}; else --yes" in refused.stderr.decode()
    done = ferry.run("forget", job_id, "--yes", "--json")
    assert json.loads(done.stdout) == [{"id": job_id, "ssh": None, "root": str(ferry.root)}]
    assert ferry.run("stop", job_id, *ferry.where(), "--force").returncode == 0, "it ran on"


def test_host_that_is_gone_is_forgotten_with_all_its_jobs(ferry: Ferry, monkeypatch) -> None:
    note(ferry, monkeypatch, "succeeded", "lost")
    assert sorted(ids(ferry)) == ["old-0", "old-1"]
    done = ferry.run("forget", "--ssh", GONE)
    assert done.returncode == 0 and f"{GONE} is forgotten here; ps asks it no more" in done.stderr.decode()
    assert ids(ferry) == []
    again = ferry.run("forget", "--ssh", GONE)
    assert again.returncode == 2 and f"nothing is noted here of {GONE}" in again.stderr.decode()


def test_host_with_a_job_that_may_run_keeps_all_until_it_is_asked_again(ferry: Ferry, monkeypatch) -> None:
    note(ferry, monkeypatch, "running", "succeeded")
    refused = ferry.run("forget", "--ssh", GONE)
    assert refused.returncode == 2 and "old-0 may still run" in refused.stderr.decode()
    assert sorted(ids(ferry)) == ["old-0", "old-1"]
    assert ferry.run("forget", "--ssh", GONE, "--remote-root", "/other", "--yes").returncode == 2
    assert ferry.run("forget", "--ssh", GONE, "--remote-root", ROOT, "--yes").returncode == 0
    assert ids(ferry) == []


def test_ids_and_a_host_are_not_taken_together(ferry: Ferry) -> None:
    for words in ((), ("one", "--ssh", GONE)):
        done = ferry.run("forget", *words)
        assert done.returncode == 2 and "forget takes ids of jobs, or --ssh HOST" in done.stderr.decode()
