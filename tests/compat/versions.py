"""The client and agent of 836d9e4 beside the present ones: one user, one project, one host.

Whoever moves or rewrites modules changes nothing here: both are used through their command line, and what they leave is
read from the job's folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deployer.agent.job.plan import parse_plan
from tests.support.ferry import REPO, Ferry
from tests.support.jobs import wait_for
from tests.support.limits import HANG_S

HERE = Path(__file__).parent
VERSION = "torchferry-836d9e4"
FINAL = ("succeeded", "failed", "stopped", "lost")
BLOCKED = "while [ ! -e go ]; do sleep 0.02; done"
"""A job that waits for the file `go` in its code folder."""


def extract(folder: Path) -> Path:
    """The code of 836d9e4, as a folder with its `deploy.py`."""
    with tarfile.open(HERE / f"{VERSION}.tar.xz") as archive:
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return folder / VERSION


@dataclass
class OldFerry(Ferry):
    """The client whose code lies in `code`."""

    code: Path = REPO

    def argv(self, *words: str) -> list[str]:
        return [sys.executable, str(self.code / "deploy.py"), *words]

    def environment(self) -> dict[str, str]:
        return {**super().environment(), "PYTHONPATH": str(self.code)}


@dataclass(frozen=True)
class Versions:
    """An old and a present client that share project, state folder, remote root and GPU leases."""

    old: OldFerry
    new: Ferry

    @classmethod
    def make(cls, folder: Path, code: Path, **env: str) -> Versions:
        places = folder / "project", folder / "state", folder / "root"
        places[0].mkdir(exist_ok=True)
        shared = {"TORCHFERRY_LEASE_DIR": str(folder / "leases"), "OMP_NUM_THREADS": "1", **env}
        return cls(OldFerry(*places, env=shared, code=code), Ferry(*places, env=shared))

    def write(self, name: str, text: str) -> None:
        (self.new.project / name).write_text(text)


@contextlib.contextmanager
def ending_jobs(versions: Versions) -> Iterator[Versions]:
    """Nothing that was started runs on afterwards."""
    try:
        yield versions
    finally:
        if any(written(versions.new.job(job_id)).get("state") not in FINAL for job_id in versions.new.job_ids()):
            done(versions.new.run("stop", "--all", "--yes", "--force", *versions.new.where()))


# --- what clients are asked -------------------------------------------------------------------------------------------


def done(process: subprocess.CompletedProcess[bytes], code: int = 0) -> str:
    """The output of a command that ended with `code`."""
    assert process.returncode == code, process.stderr.decode()
    return process.stdout.decode()


def begin(ferry: Ferry, name: str, *options: str, program: tuple[str, ...]) -> Path:
    """The folder of a job that was started, or queued, and left alone."""
    words = ("--name", name, "--python", sys.executable, "--detach", "--json", *options)
    started = json.loads(done(ferry.run("run", *ferry.where(), *words, "--", *program)))
    return Path(started["folder"])


def rows(ferry: Ferry) -> dict[str, dict[str, Any]]:
    """The rows of `ps` by id."""
    return {row["id"]: row for row in json.loads(done(ferry.run("ps", *ferry.where(), "--all", "--json")))}


def listed(ferry: Ferry, job: Path) -> dict[str, Any]:
    """A job's row of `ps`."""
    return rows(ferry)[job.name]


def told(ferry: Ferry, job: Path) -> dict[str, Any]:
    """What `status` says of a job."""
    return dict(json.loads(done(ferry.run("status", job.name, *ferry.where(), "--json"))))


def log(ferry: Ferry, job: Path, *options: str) -> str:
    return done(ferry.run("logs", job.name, *ferry.where(), "--no-follow", *options))


# --- what a job's folder says -----------------------------------------------------------------------------------------


def written(job: Path) -> dict[str, Any]:
    """The status that its supervisor wrote last."""
    try:
        return dict(json.loads((job / "status.json").read_text()))
    except FileNotFoundError:
        return {}


def reached(job: Path, *states: str) -> dict[str, Any]:
    found: dict[str, Any] = wait_for(lambda: written(job).get("state") in states and written(job), timeout_s=HANG_S)
    return found


def ended(job: Path) -> dict[str, Any]:
    return reached(job, *FINAL)


def says(job: Path, text: str, attempt: int = 1, rank: int = 0) -> None:
    """Waits until a rank has written `text`."""
    path = job / "logs" / f"attempt_{attempt}" / f"rank_{rank}.log"
    wait_for(lambda: path.exists() and text in path.read_text(), timeout_s=HANG_S)


def go(job: Path) -> None:
    (job / "code" / "go").touch()


def record(job: Path) -> dict[str, Any]:
    return dict(json.loads((job / "job.json").read_text()))


# --- who supervises ---------------------------------------------------------------------------------------------------


def words_of(pid: int) -> list[str]:
    """The command line of a process; empty when there is none."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]
    except (FileNotFoundError, ProcessLookupError):
        return []


def supervisor(job: Path) -> int:
    return int(written(job)["supervisor"]["pid"])


def is_supervised_by(code: Path, job: Path) -> bool:
    """Whether the job's supervisor runs the agent of this code, file by file."""
    words = [Path(word) for word in words_of(supervisor(job)) if "/agent/" in word]
    agents = [folder for word in words for folder in (word, word / "agent") if (folder / "rank.py").exists()]
    return bool(agents) and all(is_agent_of(code, agent) for agent in agents)


def is_agent_of(code: Path, agent: Path) -> bool:
    """Whether a folder on the host holds the agent of this code."""
    source = code / "deployer" / "agent"
    theirs, ours = ({p.relative_to(a): p.read_bytes() for p in a.rglob("*.py")} for a in (agent, source))
    return bool(ours) and theirs == ours


def kill_supervisor(job: Path) -> int:
    """Kills it as nobody can refuse; its number."""
    pid = supervisor(job)
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not words_of(pid), timeout_s=HANG_S)
    return pid


def assert_same_job(before: dict[str, Any], after: dict[str, Any]) -> None:
    """That the plan of a resume is of the same job as the one before it, which an older client made: all but its
    config, and the words in which the environment is said."""
    was, now = parse_plan(before), parse_plan(after)
    own = [role._replace(env={}) for role in was.roles], [role._replace(env={}) for role in now.roles]
    assert own[0] == own[1]
    loose = {"version": 0, "request": now.request, "roles": (), "config_yaml": None}
    assert was._replace(**loose) == now._replace(**loose)
    assert (now.request.command, now.request.torchrun) == (was.request.command, was.request.torchrun)
