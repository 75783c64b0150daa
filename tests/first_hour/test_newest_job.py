"""A command about one job means the newest one where none is named; what ends or drops a job takes none that is not."""

from __future__ import annotations

import json
import os

import pytest

from deployer.commands.options import newest_job
from deployer.errors import UnknownJob
from deployer.jobs.registry import JobRecord, write_record
from deployer.paths import state_dir
from tests.support.ferry import Ferry


def note(job_id: str, created: str, ssh: str | None, *, written_at: float = 1e9) -> None:
    write_record(JobRecord(job_id, "job", ssh, "~/.torchferry", "", created))
    os.utime(state_dir() / "jobs" / f"{job_id}.json", (written_at, written_at))


def test_newest_is_the_last_that_was_launched_on_the_host_that_is_named() -> None:
    with pytest.raises(UnknownJob, match="no job was launched from this machine"):
        newest_job()
    note("job-c", "2026-01-01T00:00:00Z", "a", written_at=2e9)  # resumed since
    note("job-b", "2026-01-02T00:00:00Z", "a", written_at=1e9)
    note("job-a", "2026-01-02T00:00:00Z", "a", written_at=1.5e9)  # within the same second, and after it
    note("job-d", "2026-01-03T00:00:00Z", None)
    assert [newest_job().job_id, newest_job("a").job_id] == ["job-d", "job-a"]
    assert newest_job(None, "~/.torchferry").job_id == "job-d"
    with pytest.raises(UnknownJob, match="no job was launched from this machine on b in /r"):
        newest_job("b", "/r")


def test_commands_without_an_id_are_about_the_newest_job(ferry: Ferry) -> None:
    nothing = ferry.run("status")
    assert nothing.returncode == 2 and b"no job was launched from this machine" in nothing.stderr
    for name in ("first", "second"):
        done = ferry.run("run", *ferry.where(), "--no-pull", "--name", name, "--", "sh", "-c", f"echo {name} >out.txt")
        assert done.returncode == 0, done.stderr.decode()
    (newest,) = (job_id for job_id in ferry.job_ids() if job_id.startswith("second"))
    told = f"the newest job: {newest}\n"

    status = ferry.run("status", "--json")
    assert (json.loads(status.stdout)["job_id"], status.stderr.decode()) == (newest, told)
    assert ferry.run("exec", "--", "cat", "out.txt").stdout == b"second\n"
    assert told in ferry.run("logs").stderr.decode()
    assert ferry.run("pull").returncode == 0 and (ferry.project / "results" / newest / "logs").is_dir()
    assert ferry.run("report", "-o", "told.html").stderr.decode() == told and (ferry.project / "told.html").is_file()
    drawn = ferry.run("plot")
    assert told in drawn.stderr.decode() and f"{newest} has written no metrics yet" in drawn.stderr.decode()
    resumed = ferry.run("resume", "policy.max_runtime=5m", "--no-pull")
    assert told in resumed.stderr.decode(), "a setting is no id"
    unknown = ferry.run("pull", "out.txt")
    assert unknown.returncode == 2 and b"no job out.txt was launched from this machine" in unknown.stderr, (
        "nor is a path"
    )

    for command in ("stop", "forget"):
        refused = ferry.run(command)
        assert refused.returncode == 2 and f"deploy.py {command} {newest}" in refused.stderr.decode()
    assert len(json.loads(ferry.run("ps", "--json", *ferry.where()).stdout)) == 2, "none is stopped or forgotten"
