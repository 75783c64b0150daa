"""Finished jobs of each kind as 836d9e4 left them on a host: read, brought home, cleared up and resumed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.agent.gpus.test_gpus import fake_smi
from tests.compat.finished import lay_out
from tests.compat.versions import HANG_S, Versions, assert_same_job, done, ending_jobs, is_agent_of, record, rows, told
from tests.support.ferry import REPO, Ferry

pytestmark = pytest.mark.timeout(900)


@dataclass(frozen=True)
class Known:
    """What is known of a finished job, and of the attempt that a resume starts."""

    state: str
    code: int | None
    log: str | None
    attempt: int = 1
    row: dict[str, Any] | None = None
    resumes: str | None = None
    """The output of the next attempt."""


JOBS = {
    "program": Known("succeeded", 0, "it wrote one step\n", row={"step": 1}, resumes="it wrote one step\n"),
    "gpu": Known("succeeded", 0, "on 0\n", row={"gpus": ["0"]}, resumes="on 0\n"),
    "ranks": Known("succeeded", 0, "[0] rank 0 of 2\n[1] rank 1 of 2\n", row={"nproc": 2}),
    "failed": Known("failed", 4, "attempt 2 ['a b']\n", 2, {"max_attempts": 2}, "attempt 3 ['a b']\n"),
    "stopped": Known("stopped", 0, "up\nsaved\n"),
    "lost": Known("lost", 125, None, resumes=""),
    "sft": Known("succeeded", 0, None, row={"step": 2, "kind": "trainer"}),
}


@dataclass(frozen=True)
class Host:
    client: Ferry
    jobs: dict[str, Path]

    def ask(self, command: str, name: str, *words: str, code: int = 0) -> str:
        asked = self.client.run(command, self.jobs[name].name, *words, *self.client.where(), timeout_s=HANG_S)
        return done(asked, code)


def host_in(folder: Path, code: Path, *names: str) -> Host:
    """A present client that has launched none of the finished jobs that lie on its host."""
    env = fake_smi(folder, gpus="0, GPU-0, Fake H100, 81559, 4\n")
    versions = Versions.make(folder, code, **env)
    return Host(versions.new, lay_out(versions.new.root, code, *names))


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory, old_code: Path) -> Host:
    """For looking alone."""
    return host_in(tmp_path_factory.mktemp("finished"), old_code)


def test_there_is_a_job_of_each_kind(host: Host) -> None:
    assert host.jobs.keys() == JOBS.keys()
    plans = [record(job)["plan"] for job in host.jobs.values()]
    assert {plan["version"] for plan in plans} == {1}
    assert {(plan["kind"], plan["torchrun"]) for plan in plans} == {
        ("program", False),
        ("program", True),
        ("trainer", False),
    }


def test_ps_lists_each_as_it_ended(host: Host) -> None:
    found = rows(host.client)
    assert found.keys() == {job.name for job in host.jobs.values()}
    for name, known in JOBS.items():
        row = found[host.jobs[name].name]
        expected = {"state": known.state, "code": known.code, "attempt": known.attempt, "name": name}
        assert row | expected | (known.row or {}) == row
    table = done(host.client.run("ps", *host.client.where()))
    assert "failed(4)" in table and "Error" not in table


def test_gc_knows_the_end_of_each(host: Host) -> None:
    words = ("gc", *host.client.where(), "--dry-run", "--older-than", "1s", "--json")
    found = json.loads(done(host.client.run(*words)))
    assert {job["id"] for job in found["jobs"]} == {job.name for job in host.jobs.values()}
    assert all(job["ended_s"] > 0 for job in found["jobs"])
    kept = json.loads(done(host.client.run("gc", *host.client.where(), "--dry-run", "--json")))
    assert kept["jobs"] == []  # none without a limit


@pytest.mark.parametrize("name", JOBS)
def test_status_and_log_are_told(host: Host, name: str) -> None:
    known, job = JOBS[name], host.jobs[name]
    found = json.loads(host.ask("status", name, "--json"))
    wrote = json.loads((job / "status.json").read_text())
    if "hint" in wrote:
        wrote["hint"] = wrote["hint"] or None  # a script reads null where there is nothing to say
    pairs = zip(found["attempts"], wrote.get("attempts", ()), strict=True)
    kept = [{name: attempt[name] for name in old} for attempt, old in pairs]
    assert {**found, "attempts": kept} | wrote == {**found, "attempts": kept}  # nothing of it is judged anew
    assert (found["state"], found["code"], found["path"]) == (known.state, known.code, str(job))
    expected = known.log
    if name == "sft":
        expected = (job / "logs" / "attempt_1" / "rank_0.log").read_text()
        assert json.loads(found["latest"])["step"] == 2
    assert host.ask("logs", name) == (expected or "")


@pytest.mark.parametrize("name", JOBS)
def test_results_come_home_byte_for_byte(host: Host, name: str, tmp_path: Path) -> None:
    job = host.jobs[name]
    host.ask("pull", name, "--checkpoints", "--to", str(tmp_path / "home"))
    home = {p.relative_to(tmp_path / "home"): p.read_bytes() for p in (tmp_path / "home").rglob("*") if p.is_file()}
    there = {p.relative_to(job): p.read_bytes() for p in job.rglob("*") if p.is_file()}
    assert home == {path: data for path, data in there.items() if path in home}
    expected = {path for path in there if path.parts[0] in ("logs", "checkpoints", "export") or len(path.parts) == 1}
    assert home.keys() >= {path for path in expected if path.name != "times.jsonl"}


@pytest.fixture
def own_host(tmp_path: Path, old_code: Path, request: pytest.FixtureRequest) -> Iterator[Host]:
    """With one job, which may change."""
    found = host_in(tmp_path, old_code, request.param)
    with ending_jobs(Versions.make(tmp_path, old_code)):
        yield found


@pytest.mark.parametrize("own_host", ["program", "gpu", "failed", "lost"], indirect=True)
def test_program_is_resumed_as_it_was(own_host: Host) -> None:
    ((name, job),) = own_host.jobs.items()
    before = record(job)
    assert own_host.ask("resume", name) == JOBS[name].resumes
    began = [n for n in range(1, JOBS[name].attempt + 1) if name != "lost"]  # that one never began
    check_resumed(own_host, job, before, began=[*began, JOBS[name].attempt + 1])


@pytest.mark.parametrize("own_host", ["ranks"], indirect=True)
def test_program_under_torchrun_is_resumed_as_it_was(own_host: Host) -> None:
    ((name, job),) = own_host.jobs.items()
    before = record(job)
    lines = own_host.ask("resume", name).splitlines()
    assert sorted(lines) == ["[0] rank 0 of 2", "[1] rank 1 of 2"]
    check_resumed(own_host, job, before, began=[1, 2])


@pytest.mark.parametrize("own_host", ["stopped"], indirect=True)
def test_stopped_program_runs_again_and_is_stopped_again(own_host: Host) -> None:
    ((name, job),) = own_host.jobs.items()
    own_host.ask("resume", name, "--detach")
    assert not (job / "control" / "stop.json").exists()
    assert told(own_host.client, job)["state"] in ("preparing", "running")
    own_host.ask("stop", name)
    assert [a["state"] for a in told(own_host.client, job)["attempts"]] == ["stopped", "stopped"]


@pytest.mark.parametrize("own_host", ["sft"], indirect=True)
def test_training_goes_on_from_its_checkpoint_with_its_own_trainer(own_host: Host) -> None:
    ((name, job),) = own_host.jobs.items()
    before = record(job)
    shown = own_host.ask("resume", name, "train.steps=4", "run.export=false")
    assert "step 3/4" in shown and "step 2/4" not in shown
    check_resumed(own_host, job, before, began=[1, 2])
    assert told(own_host.client, job)["resumed_from"] == 2
    made = [json.loads(line) for line in (job / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in made if "loss" in row] == [1, 2, 3, 4]


def check_resumed(host: Host, job: Path, before: dict[str, Any], *, began: list[int]) -> None:
    found = told(host.client, job)
    assert (found["state"], found["code"], found["attempt"]) == ("succeeded", 0, began[-1])
    assert [a["attempt"] for a in found["attempts"]] == began
    assert is_agent_of(REPO, Path(found["slots"]["agent"]))
    after = record(job)
    assert [entry["plan_before"] for entry in after["resumed"]] == [before["plan"]]
    assert_same_job(before["plan"], after["plan"])
    assert (after["env"], after["created_at"]) == (before["env"], before["created_at"])


@pytest.mark.parametrize("own_host", ["sft"], indirect=True)
def test_present_trainer_begins_from_its_checkpoint(own_host: Host) -> None:
    (job,) = own_host.jobs.values()
    for name in ("tiny.py", "rows.jsonl"):
        (own_host.client.project / name).write_bytes((job / "code" / name).read_bytes())
    words = (f"train.resume={job}/checkpoints/step_000002", "train.steps=3", "run.export=false", "run.name=new")
    where = (*own_host.client.where(), "--python", sys.executable, "--no-pull")
    shown = done(own_host.client.run("run", "tiny.py", *words, *where, timeout_s=HANG_S))
    assert "step 3/3" in shown and "step 2/3" not in shown
    kept = json.loads(
        done(own_host.client.run("gc", *own_host.client.where(), "--dry-run", "--keep-jobs", "1", "--json"))
    )
    assert kept["jobs"] == []  # the new one began from it
