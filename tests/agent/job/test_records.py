"""What the records of a job say comes back as it was written; what cannot be is told in one line, and never a trace."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from deployer.agent.host.layout import Job
from deployer.agent.host.typed import from_json, to_json
from deployer.agent.job.ending import Outcome, RankRecord, read_outcome, read_ranks
from deployer.agent.job.judge import judge
from deployer.agent.job.status import (
    RUNNING,
    AttemptReport,
    GroupStatus,
    Status,
    read_status,
    status_from_json,
    status_to_json,
    with_group,
    write_status,
)
from deployer.agent.job.views import JobView, Row, StopReport
from tests.agent.typed_values import values_of
from tests.support.ferry import Ferry
from tests.support.jobs import GO, end_of, make_job, make_plan, run_up, wait_for

# --- written and read -------------------------------------------------------------------------------------------------


def through_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


@given(values_of(Status))
@settings(deadline=None)
def test_status_written_and_read_is_the_same(status: Status) -> None:
    for sparse in (False, True):
        assert status_from_json(through_json(status_to_json(status, sparse=sparse))) == status
        assert from_json(through_json(to_json(status, sparse=sparse)), Status) == status


@pytest.mark.parametrize(
    "kind", [RankRecord, AttemptReport, Outcome, JobView, StopReport, Row], ids=lambda k: k.__name__
)
def test_record_written_and_read_is_the_same(kind: Any) -> None:
    @given(values_of(kind))
    @settings(deadline=None)
    def check(value: Any) -> None:
        for sparse in (False, True):
            assert from_json(through_json(to_json(value, sparse=sparse)), kind) == value

    check()


def test_groups_stand_in_the_file_alone_only_where_there_are_several() -> None:
    one = with_group(Status(RUNNING), "", nproc=2, cwd="/x")
    assert {"nproc": 2, "cwd": "/x"}.items() <= status_to_json(one, sparse=True).items()
    two = with_group(with_group(Status(RUNNING), "trainer", nproc=2), "server", nproc=1)
    assert [group["folder"] for group in status_to_json(two)["groups"]] == ["trainer", "server"]
    assert with_group(two, "server", nproc=3).groups == (GroupStatus("trainer", 2), GroupStatus("server", 3))


def test_what_judge_adds_is_in_no_file(tmp_path: Path) -> None:
    job = run_up(tmp_path, "j", GO)
    written = Path(job.status).read_text()
    write_status(job, judge(job)._replace(on_host="x", unsupervised=True, damaged="y"))
    assert json.loads(Path(job.status).read_text()) == json.loads(written)
    (Path(job.code) / "go").touch()
    assert end_of(job) == read_status(job)


# --- wrong types ------------------------------------------------------------------------------------------------------

WRONG: list[Any] = ["x", -1, 1.5, [1], {"a": {}}, True, 1 << 70, None]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A trainer's job that has ended well, with all of its files."""
    root = tmp_path_factory.mktemp("ended")
    job = run_up(root, "j", GO + "open('../outcome.json', 'w').write('{\"state\": \"succeeded\"}')")
    (Path(job.code) / "go").touch()
    assert end_of(job).state == "succeeded"
    return job


def changed(value: Any) -> list[Any]:
    """The value with each of its keys, at any depth, of every wrong type in turn; and without it."""
    if not isinstance(value, dict):
        return []
    found: list[Any] = []
    for key, inner in value.items():
        rest = {name: other for name, other in value.items() if name != key}
        found += [rest, *({**value, key: wrong} for wrong in WRONG), *({**value, key: each} for each in changed(inner))]
    return found


def test_status_of_wrong_types_is_a_status_or_says_which_is_not(ended: Job, tmp_path: Path) -> None:
    job = make_job(tmp_path, "j", make_plan([]))
    values = changed(json.loads(Path(ended.status).read_text()))
    assert len(values) > 200
    for value in values:
        Path(job.status).write_text(json.dumps(value))
        status = judge(job)
        assert not status.damaged or re.match(r"its status\.json is (damaged: .+|of another job, )", status.damaged)


def test_record_of_a_rank_of_wrong_types_counts_or_does_not(ended: Job, tmp_path: Path) -> None:
    job = make_job(tmp_path, "j", make_plan([]))
    Path(job.ranks(1)).mkdir(parents=True)
    whole = json.loads((Path(ended.ranks(1)) / "rank_0.json").read_text())
    for value in [whole, *changed(whole)]:
        (Path(job.ranks(1)) / "rank_0.json").write_text(json.dumps(value))
        for rank in read_ranks(job, 1):
            assert from_json(to_json(rank), RankRecord) == rank
    (Path(job.ranks(1)) / "rank_0.json").write_text(json.dumps({**whole, "wrapper": {"pid": "7", "start_time": 1}}))
    assert read_ranks(job, 1) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"state": "succeeded", "loss": NaN, "startup": {}}', Outcome("succeeded")),
        ('{"state": "failed", "rank": 1, "error": "Error: x\\nin y"}', Outcome("failed", "Error: x\nin y", 1)),
        ('{"state": "failed", "rank": "1"}', None),
        ('{"state": "done"}', None),
        ('{"state": "failed", "error": {}}', None),
        ("[]", None),
    ],
)
def test_outcome_is_what_the_trainer_wrote_or_none(tmp_path: Path, text: str, expected: Outcome | None) -> None:
    job = make_job(tmp_path, "j", make_plan([]))
    Path(job.outcome).write_text(text)
    assert read_outcome(job) == expected


FILES = {
    "status.json": {"state": 5, "attempt": [], "queue": 7},
    "job.json": {"plan": {"gpus": 7, "name": {}, "nproc": "x"}, "created_at": "long ago"},
    "ranks/attempt_1/rank_0.json": {"rank": "0", "pid": [], "wrapper": 5},
    "outcome.json": {"state": 5, "error": [], "rank": {}},
    "metrics.jsonl": [[1]],
}


@pytest.mark.parametrize("file", FILES)
def test_commands_on_a_job_with_a_file_of_wrong_types_say_so_and_leave_no_trace(ferry: Ferry, file: str) -> None:
    job, other = run_up(ferry.root, "j", GO), run_up(ferry.root, "other", GO)
    (Path(other.code) / "go").touch()
    end_of(other)
    supervisor = judge(job).supervisor
    assert supervisor is not None
    if file == "status.json":  # a supervisor would write its own again
        os.kill(supervisor.pid, signal.SIGSTOP)
    (Path(job.path) / file).write_text(json.dumps(FILES[file]) + "\n")
    told = {}
    for words in (("ps",), ("ps", "--json"), ("status", "j"), ("status", "j", "--json"), ("logs", "j", "--no-follow")):
        done = ferry.run(*words, *ferry.where())
        told[words] = done.stdout.decode()
        assert done.returncode == 0 and b"Traceback" not in done.stdout + done.stderr, done.stderr.decode()
    rows = {row["id"]: row for row in json.loads(told["ps", "--json"])}
    assert (rows["j"]["state"], rows["other"]["state"]) == ("running", "succeeded")
    assert told["logs", "j", "--no-follow"] == "up\n"
    if file in ("status.json", "job.json"):
        (line,) = (line for line in told[("ps",)].splitlines() if line.startswith("j "))
        assert f"running (its {file} is damaged: " in line.replace("unsupervised, ", "")
    if file == "status.json":
        assert "warning" in told["status", "j"] and "its status.json is damaged: state is 5" in told["status", "j"]
    done = ferry.run("stop", "j", "--grace", "0", *ferry.where())
    assert done.returncode == 0 and b"Traceback" not in done.stderr and b"j stopped; " in done.stderr, done.stderr
    wait_for(lambda: not Path(f"/proc/{supervisor.pid}").exists())
