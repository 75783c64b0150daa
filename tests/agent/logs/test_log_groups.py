"""Logs and records of a job with several groups of processes: their names, their order, who is chosen, who writes."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployer.agent import rank as wrapper
from deployer.agent.host.layout import (
    AGENT_DIR,
    ATTEMPT_ENV,
    GROUP_ENV,
    RUN_DIR_ENV,
    GroupName,
    Job,
    LogName,
    Root,
    group_files,
)
from deployer.agent.host.marks import job_processes
from deployer.agent.host.typed import to_json
from deployer.agent.job import progress
from deployer.agent.job.ending import RankRecord, read_ranks
from deployer.agent.job.groups import MOST_RANKS, processes_of
from deployer.agent.job.plan import Devices, RoleName, groups_of, main_role
from deployer.agent.job.views import Processes
from deployer.agent.logs.keep import LogKeeper
from deployer.agent.logs.read import ALL, Chosen, LogReader, last_lines, log_names, tail_offsets
from deployer.agent.logs.times import attempt_at, offsets_at
from deployer.agent.supervisor.command import job_env
from deployer.agent.supervisor.start import LaunchInput
from tests.support.jobs import make_plan, python, run_job, wait_for

ROLES = st.from_regex(r"[a-z][a-z0-9_-]{0,30}", fullmatch=True).filter(
    lambda name: not name.startswith("attempt_") and not (name[:4] == "node" and name[4:5].isdigit())
)
NUMBERS = st.integers(0, 999_999_999)
FILES = st.one_of(st.sampled_from(["prepare.log", "launcher.log"]), NUMBERS.map("rank_{}.log".format))
GROUPS = st.builds(GroupName, st.none() | ROLES, st.none() | NUMBERS)
NAMES = st.builds(LogName, st.integers(1, 999_999_999), GROUPS, FILES, st.integers(1, 999_999_999))
EVERY = [
    "prepare.log",
    "server/node0/launcher.log",
    "server/node1/launcher.log",
    "trainer/launcher.log",
    "server/node0/rank_0.log",
    "server/node1/rank_2.log",
    "server/node1/rank_10.log",
    "trainer/rank_0.log",
]
"""Of one attempt, in reading order: a server on two nodes and a trainer on one."""


# --- names ------------------------------------------------------------------------------------------------------------


@given(NAMES)
def test_name_of_a_log_is_read_as_what_it_was_written_from(name):
    assert LogName.parse(name.text) == name
    assert GroupName.parse(name.group.folder) == name.group
    assert name._replace(copy=1).text.endswith("/".join([*name.group.words, name.file]))


@given(st.lists(st.one_of(st.text(max_size=6), ROLES, FILES, st.sampled_from(["node1", "attempt_2"])), max_size=5))
def test_what_is_taken_for_a_name_is_written_the_same(parts):
    text = "/".join(parts)
    name, group = LogName.parse(text), GroupName.parse(text)
    assert name is None or name.text == text
    assert group is None or group.folder == text


@pytest.mark.parametrize(
    ("text", "attempt", "group", "rank", "writer"),
    [
        ("rank_0.log", 1, (None, None), 0, "rank 0"),
        ("attempt_2/rank_10.log", 2, (None, None), 10, "rank 10"),
        ("node1/rank_3.log", 1, (None, 1), 3, "node1 rank 3"),
        ("attempt_12/server/launcher.log", 12, ("server", None), None, "server launcher"),
        ("server/node0/rank_1.log", 1, ("server", 0), 1, "server node0 rank 1"),
    ],
)
def test_names_are_these(text, attempt, group, rank, writer):
    name = LogName.parse(text)
    assert name is not None
    assert (name.attempt, name.group, name.rank, name.writer, name.text) == (attempt, group, rank, writer, text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "rank_0",
        "rank_.log",
        "rank_01.log",
        "rank_².log",
        "rank_٣.log",
        "rank_1234567890.log",
        "attempt_1/rank_0.log",
        "attempt_0/rank_0.log",
        "attempt_02/rank_0.log",
        "attempt_2/attempt_3/rank_0.log",
        "/rank_0.log",
        "../rank_0.log",
        "server/../rank_0.log",
        "node01/rank_0.log",
        "node1/server/rank_0.log",
        "node1/node2/rank_0.log",
        "server/node1/x/rank_0.log",
        "Server/rank_0.log",
        "server.log/rank_0.log",
        "server/node1/times.jsonl",
        "server/rank_0.log\n",
        "rank_0.log~1",
        "rank_0.log~02",
        "rank_0.log.1",
    ],
)
def test_strange_name_is_no_logs(text):
    assert LogName.parse(text) is None


@pytest.mark.parametrize(("roles", "nodes"), [(1, 1), (1, 3), (2, 1), (2, 3)])
def test_every_group_of_a_plan_has_a_folder_that_names_it(roles, nodes):
    assert all(GroupName.parse(name) == (name, None) for name in get_args(RoleName))
    plan = make_plan(["true"])
    role = plan.roles[0]._replace(nodes=(Devices("cpu"),) * nodes)
    names = get_args(RoleName)[:roles]
    groups = list(groups_of(plan._replace(roles=tuple(role._replace(name=name) for name in names))))
    assert len({group.folder for group in groups}) == roles * nodes
    for group in groups:
        name = GroupName.parse(group.folder)
        assert name == (group.role.name if roles > 1 else None, group.node if nodes > 1 else None)
        assert Job("/j").logs(2, group.folder) == f"/j/logs/attempt_2/{group.folder}".rstrip("/")


# --- readers ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def job(tmp_path: Path) -> Job:
    job = Root(str(tmp_path)).job("j")
    for name in EVERY:
        write(job, name, f"{name}\n".encode() * 3)
    return job


def write(job: Job, name: str, data: bytes, attempt: int = 1) -> Path:
    path = Path(job.logs(attempt)) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def texts(job: Job, chosen: Chosen = ALL) -> list[str]:
    return [name.text for name in log_names(job, 1, chosen)]


def test_order_is_preparation_launchers_then_role_node_and_rank_by_number(job):
    assert texts(job) == EVERY
    assert [chunk.file for chunk in LogReader(job).poll()] == EVERY


def test_links_and_folders_that_are_no_groups_are_passed_over(job):
    top = Path(job.logs(1))
    for name in ("server/node1/node2/rank_0.log", "node1/server/rank_0.log", "Other/rank_0.log", "node01/rank_5.log"):
        write(job, name, b"x")
    os.mkfifo(top / "rank_7.log")
    (top / "linked").symlink_to(top / "trainer")
    (top / "trainer" / "rank_9.log").symlink_to(top / "trainer" / "rank_0.log")
    assert texts(job) == EVERY


@pytest.mark.parametrize(
    "chosen", [Chosen(*values) for values in itertools.product((None, "server"), (None, 0, 1), (None, {0}, {2, 10}))]
)
def test_role_node_and_rank_combine(job, chosen):
    def is_wanted(name: str) -> bool:
        if name == "prepare.log":
            return chosen.ranks is None
        role, node = name.split("/")[0], 1 if "node1" in name else 0
        rank = int(name[:-4].rpartition("_")[2]) if "rank_" in name else None
        of_group = chosen.role in (None, role) and chosen.node in (None, node)
        return of_group and (chosen.ranks is None or rank in chosen.ranks)

    expected = list(filter(is_wanted, EVERY))
    assert texts(job, chosen) == expected
    assert list(tail_offsets(job, 1, chosen)) == expected
    assert [chunk.file for chunk in LogReader(job, chosen=chosen).poll()] == expected


@pytest.mark.parametrize(("role", "node"), [(None, None), (None, 0), ("trainer", None), ("trainer", 0)])
def test_logs_of_a_jobs_only_group_are_its_roles_and_node_0s(tmp_path, role, node):
    job = Root(str(tmp_path)).job("j")
    for name in ("prepare.log", "launcher.log", "rank_0.log"):
        write(job, name, b"x")
    assert texts(job, Chosen(role, node)) == ["prepare.log", "launcher.log", "rank_0.log"]
    assert texts(job, Chosen(role, 1)) == ["prepare.log"]


def test_reader_goes_on_by_offsets_into_the_next_attempts_groups(job):
    reader = LogReader(job, offsets=dict.fromkeys(EVERY, 3), chosen=Chosen("server", 1))
    chunks = reader.poll()
    assert [(c.file, c.offset) for c in chunks[1:]] == [(n, 3) for n in EVERY if "node1" in n]
    write(job, "server/node1/rank_2.log", b"again", attempt=2)
    (chunk,) = reader.poll()
    assert (chunk.file, chunk.offset, chunk.data) == ("attempt_2/server/node1/rank_2.log", 0, b"again")
    assert LogReader(job, offsets=reader.offsets, chosen=Chosen("server", 1)).poll() == []


def test_last_lines_are_of_the_rank_the_launcher_or_the_preparation_of_a_group(job):
    assert last_lines(job, Chosen("server", 1, {2}), 1) == b"server/node1/rank_2.log\n"
    assert last_lines(job, Chosen("trainer"), 1) == b"trainer/launcher.log\n"
    write(job, "trainer/launcher.log", b"")
    assert last_lines(job, Chosen("trainer"), 1) == b"prepare.log\n"
    assert progress.last_line(job, 10, 1, GroupName("server", 1)) == "server/node1/rank_10.log"


def test_output_of_any_group_counts_as_progress(job):
    assert [Path(path).relative_to(job.logs(1)).as_posix() for path in progress.rank_logs(job, 1)] == EVERY[4:]
    before = progress.output_fingerprint(job, 1)
    assert progress.output_fingerprint(job, 1) == before
    write(job, "server/node1/rank_10.log", b"new")
    assert progress.output_fingerprint(job, 1) != before


def test_each_folder_keeps_its_own_index_and_limit(job):
    folders = ["", "server/node0", "server/node1", "trainer"]
    big = write(job, "server/node1/rank_2.log", b"%07d\n" % 1 * 100_000)
    for folder in folders:
        LogKeeper(job.logs(1, folder), 400_000).look(now=True)
    sizes = {f: json.loads((Path(job.logs(1, f)) / "times.jsonl").read_text())[2] for f in folders}
    assert {f"{folder}/{file}".lstrip("/") for folder, found in sizes.items() for file in found} == set(EVERY)
    dropped = json.loads((big.parent / "dropped.json").read_text())["rank_2.log"]
    assert dropped >= 400_000 and not (Path(job.logs(1)) / "dropped.json").exists()
    reader = LogReader(job, chosen=Chosen("server", 1, {2}))
    assert (reader.poll()[0].dropped, reader.limit("server/node1/rank_2.log")) == (dropped, 400_000)


def test_since_finds_the_place_in_each_groups_logs(job):
    for folder, size in (("trainer", 40), ("server/node0", 25)):
        entries = [[1000.0 + i, 50.0 + i, {"rank_0.log": size * i}] for i in range(4)]
        write(job, f"{folder}/times.jsonl", "".join(json.dumps(entry) + "\n" for entry in entries).encode())
    write(job, "trainer/rank_0.log", b"1234567\n" * 20, attempt=2)
    assert attempt_at(job, 1001.5) == 1 and attempt_at(job, 2000.0) == 2
    assert offsets_at(job, 1, 1001.5) == {"trainer/rank_0.log": 38, "server/node0/rank_0.log": 24}


# --- records ----------------------------------------------------------------------------------------------------------


def put_record(job: Job, folder: str, rank: int, code: int) -> None:
    record = {"job": job.id, "rank": rank, "pid": 1, "start_time": 1, "wrapper": {"pid": 1, "start_time": 1}}
    path = Path(job.ranks(1, folder)) / f"rank_{rank}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**record, "code": code}))


def test_records_of_all_groups_are_read_and_say_whose_they_are(job):
    places = [("trainer", 0), ("server/node1", 10), ("server/node1", 9), ("server/node0", 0)]
    for code, (folder, rank) in enumerate(places):
        put_record(job, folder, rank, code)
    found = read_ranks(job, 1)
    assert [(r.group.folder, r.rank, r.code) for r in found] == [
        ("server/node0", 0, 3),
        ("server/node1", 9, 2),
        ("server/node1", 10, 1),
        ("trainer", 0, 0),
    ]
    assert read_ranks(job, 2) == [] and all(isinstance(record, RankRecord) for record in found)


def test_groups_are_told_by_the_logs_that_have_begun(job):
    assert processes_of(job, 1) == [("server", 0, (0,)), ("server", 1, (2, 10)), ("trainer", 0, (0,))]
    record = {"plan": to_json(make_plan(["true"], nproc=2))}
    Path(job.record).write_text(json.dumps(record))
    assert Processes("program", 0, ()) in processes_of(job, 2)


def test_only_group_has_its_plans_role_and_all_its_ranks(tmp_path):
    job = Root(str(tmp_path)).job("j")
    Path(job.path).mkdir(parents=True)
    assert processes_of(job, 2) == [("", 0, (0, 1))]
    Path(job.record).write_text(json.dumps({"plan": to_json(make_plan(["true"]))}))
    assert processes_of(job, 2) == [("program", 0, (0, 1))]
    assert processes_of(job, 1 << 50) == [("program", 0, tuple(range(MOST_RANKS)))]


# --- who writes them --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["", "trainer", "server/node1"])
def test_wrapper_writes_below_the_folder_of_its_group(tmp_path, folder):
    job = Root(str(tmp_path)).job("j")
    for place in (job.logs(2, folder), job.ranks(2, folder)):
        Path(place).mkdir(parents=True)
    env = {
        **os.environ,
        RUN_DIR_ENV: job.path,
        ATTEMPT_ENV: "2",
        "RANK": "3",
        **({GROUP_ENV: folder} if folder else {}),
    }
    done = subprocess.run([sys.executable, f"{AGENT_DIR}/rank.py", "-c", "print('hello'); exit(4)"], env=env)
    assert done.returncode == 4 and wrapper.GROUP_ENV == GROUP_ENV
    assert [(group.folder, file) for group, file in group_files(job.logs(2))] == [(folder, "rank_3.log")]
    assert (Path(job.logs(2, folder)) / "rank_3.log").read_text() == "hello\n"
    assert [(r.group.folder, r.rank, r.code) for r in read_ranks(job, 2)] == [(folder, 3, 4)]


def test_environment_has_no_group_of_an_outer_job() -> None:
    plan, base = make_plan([]), {GROUP_ENV: "server/node1", "TORCHFERRY_RESTARTED": "1"}
    given = LaunchInput(plan, 1, base_env=base)
    env = job_env(Job("/root/jobs/j"), main_role(plan), given, {}, attempt=1, restarted=False)
    assert GROUP_ENV not in env and "TORCHFERRY_RESTARTED" not in env


def test_job_launched_by_a_job_of_several_groups_writes_its_own_logs(tmp_path):
    env = {**os.environ, GROUP_ENV: "server/node1"}
    status = run_job(tmp_path, "inner", make_plan(python("print('up')")), base_env=env)
    inner = Root(str(tmp_path)).job("inner")
    assert status.state == "succeeded" and (Path(inner.logs(1)) / "rank_0.log").read_text() == "up\n"


def test_process_that_writes_into_a_groups_log_is_the_jobs(job):
    with (Path(job.logs(1)) / "server/node1/rank_2.log").open("ab") as log:
        process = subprocess.Popen(["sleep", "1000"], stdout=log, env={}, start_new_session=True)
    try:
        wait_for(lambda: process.pid in [found.pid for found in job_processes(job)])
    finally:
        process.kill()
        process.wait()
