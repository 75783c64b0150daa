"""Jobs of several roles or nodes under the real supervisor. A client cannot launch these yet, for `parse_plan` refuses
their plans: each is built as a value."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from deployer.agent.gpus.view import SHARED, Claim, InheritedClaim
from deployer.agent.host.layout import GROUP_ENV, Job
from deployer.agent.host.marks import job_processes
from deployer.agent.host.processes import process_of
from deployer.agent.job.judge import judge
from deployer.agent.job.plan import Devices, Plan, Role, groups_of, max_restarts, visible_to, wanted_gpus
from deployer.agent.job.status import Status, read_status, with_group, write_status
from deployer.agent.job.stop import request_stop
from deployer.agent.supervisor.mains import find_mains
from deployer.agent.supervisor.start import LaunchInput, adopt, spawn
from deployer.commands.in_words import stall_lines, telling_log
from tests.support.jobs import (
    end_of,
    kill_supervisor,
    log_of,
    make_job,
    make_plan,
    python,
    said,
    start,
    torchrun,
    wait_for,
)
from tests.support.limits import FOREVER_S, PATIENCE, patient

WHERE = "import os, sys, time\nme = os.environ['TORCHFERRY_GROUP']\nprint('up in', me)\n"
WAITS = WHERE + "while not os.path.exists('go'): time.sleep(0.02)\n"
SAVES_AFTER_TERM = (
    WHERE
    + """
import signal
def save(*_):
    signal.signal(signal.SIGTERM, lambda *_: os._exit(9))  # who is told twice saves nothing
    time.sleep(2)
    open('saved ' + me.replace('/', ' '), 'w').close()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print('ready')
time.sleep(1000)
"""
)


def role(name: str, code: str, *, nodes: int = 1, **changes: Any) -> Role:
    made = make_plan(**{"argv": python(code), "kind": name, **changes}).roles[0]
    return made._replace(nodes=made.nodes * nodes)


def plan_of(*roles: Role, **changes: Any) -> Plan:
    return make_plan([], **changes)._replace(roles=roles)


def begin(root: Path, plan: Plan, **more: Any) -> Job:
    """All its groups have said that they are up."""
    job = start(make_job(root, "groups", plan), plan, **more)
    for group in groups_of(plan):
        if not group.role.torchrun:
            said(job, "up in " + group.folder, group.folder + "/rank_0.log")
            wait_for((Path(job.ranks(1, group.folder)) / "rank_0.json").exists)
    wait_for(lambda: judge(job).state == "running")
    return job


def record_of(job: Job, folder: str) -> Any:
    return json.loads((Path(job.ranks(1, folder)) / "rank_0.json").read_text())


def by_folder(status: Status) -> dict[str, Any]:
    return {group.folder: group for group in status.groups}


# --- each its own -----------------------------------------------------------------------------------------------------


def test_every_group_has_its_process_log_record_and_status_and_the_job_ends_with_its_main_role(tmp_path: Path) -> None:
    plan = plan_of(role("trainer", WAITS), role("program", WHERE + "time.sleep(1000)", nodes=2))
    job = begin(tmp_path, plan)
    folders = ["trainer", "program/node0", "program/node1"]
    running = judge(job)
    assert [group.folder for group in running.groups] == folders
    for folder in folders:
        group, record = by_folder(running)[folder], record_of(job, folder)
        assert group.main == process_of(record["wrapper"]["pid"])
        environ = Path(f"/proc/{record['pid']}/environ").read_bytes().split(b"\0")
        assert f"{GROUP_ENV}={folder}".encode() in environ
        assert (Path(job.logs(1, folder)) / "launcher.log").exists()
    (Path(job.code) / "go").touch()
    status = end_of(job)
    assert (status.state, status.code, status.reason) == ("succeeded", 0, "exited with code 0")
    assert (status.swept, status.remaining, job_processes(job)) == (4, (), [])
    assert [record_of(job, folder)["code"] for folder in folders] == [0, 143, 143]
    assert all((Path(job.logs(1, folder)) / "times.jsonl").exists() for folder in folders)


def test_job_whose_main_role_is_on_two_nodes_ends_with_the_last_of_them(tmp_path: Path) -> None:
    job = begin(tmp_path, plan_of(role("program", WAITS + "time.sleep(1 if me == 'node1' else 0)", nodes=2)))
    (Path(job.code) / "go").touch()
    status = end_of(job)
    assert (status.state, status.reason, status.swept) == ("succeeded", "every rank exited with code 0", 0)
    assert [record_of(job, folder)["code"] for folder in ("node0", "node1")] == [0, 0]


# --- ends -------------------------------------------------------------------------------------------------------------


def test_failure_on_one_node_of_a_trainer_ends_the_others_and_is_told_with_its_place(tmp_path: Path) -> None:
    code = WAITS + "import signal\nsys.exit(7) if me == 'node1' else time.sleep(1000)"
    job = begin(tmp_path, plan_of(role("trainer", code, nodes=2)))
    (Path(job.code) / "go").touch()
    status = end_of(job)
    assert (status.state, status.code, status.reason) == ("failed", 7, "node1 rank 0 exited with code 7")
    assert (status.first_failing_group, status.first_failing_rank) == ("node1", 0)
    assert status.attempts[0].first_failing_group == "node1"
    assert telling_log(status) == ["--node", "1", "--rank", "0"]
    ends = [record_of(job, folder) for folder in ("node0", "node1")]
    assert ends[0]["code"] == 137
    assert 4 < (ends[0]["ended_mono_ns"] - ends[1]["ended_mono_ns"]) / 1e9 < 25 * PATIENCE


def test_failure_of_another_role_is_the_jobs(tmp_path: Path) -> None:
    server = role("program", WAITS + "sys.exit(3)")
    job = begin(tmp_path, plan_of(role("trainer", WHERE + "time.sleep(1000)"), server))
    (Path(job.code) / "go").touch()
    status = end_of(job)
    assert (status.state, status.code, status.reason) == ("failed", 3, "program rank 0 exited with code 3")
    assert (status.first_failing_group, record_of(job, "trainer")["code"]) == ("program", 137)


def test_failed_job_starts_all_its_groups_again_as_often_as_its_main_role_may(tmp_path: Path) -> None:
    code = WHERE + "time.sleep(0.5); sys.exit(5 if os.environ['TORCHFERRY_ATTEMPT'] == '1' else 0)"
    server = role("program", WHERE + "time.sleep(1000)", max_restarts=9)
    plan = plan_of(role("trainer", code, max_restarts=2), server)
    assert max_restarts(plan) == 2
    job = start(make_job(tmp_path, "groups", plan), plan)
    status = end_of(job)
    assert (status.state, status.attempt, status.max_attempts) == ("succeeded", 2, 3)
    assert status.attempts[0].error == "up in trainer"
    logs = [Path(job.logs(n, folder)) / "rank_0.log" for n in (1, 2) for folder in ("trainer", "program")]
    assert [log.read_text() for log in logs] == ["up in trainer\n", "up in program\n"] * 2


def test_launcher_that_fails_before_its_ranks_begin_is_named(tmp_path: Path) -> None:
    broken = role("program", "", argv=[[{"slot": "python"}], "-c", "import sys; sys.exit(4)"], torchrun=True)
    job = start(make_job(tmp_path, "groups", make_plan([])), plan_of(role("trainer", WHERE + "time.sleep(99)"), broken))
    status = end_of(job)
    assert (status.state, status.code, status.first_failing_rank) == ("failed", 4, None)
    assert record_of(job, "trainer")["code"] == 137
    assert (
        status.reason == "the program launcher ended with code 4, no rank's failure is known, and nothing was written"
    )
    assert telling_log(status) is None


# --- stop -------------------------------------------------------------------------------------------------------------


def test_stop_ends_every_group_and_gives_each_its_time_to_save(tmp_path: Path) -> None:
    quick = role("program", WHERE + "time.sleep(1000)")  # the main role, which ends at once
    job = begin(tmp_path, plan_of(quick, role("trainer", SAVES_AFTER_TERM, nodes=2)))
    for node in (0, 1):
        said(job, "ready", f"trainer/node{node}/rank_0.log")
    request_stop(job, FOREVER_S)
    status = end_of(job)
    assert (status.state, status.swept, status.remaining, job_processes(job)) == ("stopped", 0, (), [])
    assert sorted(path.name for path in Path(job.code).iterdir()) == ["saved trainer node0", "saved trainer node1"]


def test_stop_does_not_wait_for_a_group_that_has_not_begun_nor_cut_short_one_that_saves(tmp_path: Path) -> None:
    starting = role("trainer", "", **torchrun("print('up')"))  # torchrun itself imports torch for seconds
    job = begin(tmp_path, plan_of(role("program", SAVES_AFTER_TERM), starting))
    said(job, "ready", "program/rank_0.log")
    request_stop(job, FOREVER_S)
    assert end_of(job).state == "stopped"
    assert [path.name for path in Path(job.code).iterdir()] == ["saved program"]
    assert log_of(job, "trainer/rank_0.log") == ""


def test_stalled_job_tells_what_each_group_said_last(tmp_path: Path) -> None:
    plan = plan_of(role("program", WHERE + "time.sleep(1000)", nodes=2), policy={"stall_timeout_s": patient(2)})
    status = end_of(begin(tmp_path, plan))
    assert (status.state, status.code) == ("failed", 124)
    assert stall_lines(status) == [f"node{n} rank 0 still ran; its last line: up in node{n}" for n in (0, 1)]
    assert status.attempts[0].error == "up in node0\nup in node1"


# --- the supervisor's death -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noted", [True, False], ids=["noted", "found by their marks"])
def test_adopted_job_goes_on_in_all_its_groups_though_nobody_understands_its_plan(tmp_path: Path, noted: bool) -> None:
    code = WAITS + "time.sleep(1 if me == 'node1' else 0); sys.exit(6 if me == 'node1' else 0)"
    job = begin(tmp_path, plan_of(role("program", code, nodes=2)))
    kill_supervisor(job)
    status = judge(job)
    assert (status.state, status.unsupervised, len(status.groups)) == ("running", True, 2)
    if not noted:
        write_status(job, with_group(with_group(status, "node0", main=None), "node1", main=None))
        unnoted = read_status(job)
        assert unnoted is not None and find_mains(unnoted, job_processes(job)) == status.groups
    adopt(job)
    assert not judge(job).unsupervised
    (Path(job.code) / "go").touch()
    status = end_of(job)
    assert (status.state, status.code, status.reason) == ("failed", 6, "node1 rank 0 exited with code 6")
    assert read_status(job) == status


def test_adopted_job_of_several_groups_can_be_stopped(tmp_path: Path) -> None:
    plan = plan_of(role("program", SAVES_AFTER_TERM), role("trainer", SAVES_AFTER_TERM))
    job = begin(tmp_path, plan)
    for folder in ("program", "trainer"):
        said(job, "ready", folder + "/rank_0.log")
    kill_supervisor(job)
    spawn(job, LaunchInput(plan, 1, base_env=dict(os.environ), adopt=True))
    request_stop(job, FOREVER_S)
    status = end_of(job)
    assert (status.state, status.remaining, job_processes(job)) == ("stopped", (), [])
    assert sorted(path.name for path in Path(job.code).iterdir()) == ["saved program", "saved trainer"]


def test_end_of_a_main_role_is_known_though_supervisor_and_server_were_killed_after_it(tmp_path: Path) -> None:
    job = begin(tmp_path, plan_of(role("program", WAITS), role("trainer", WHERE + "time.sleep(1000)")))
    kill_supervisor(job)
    (Path(job.code) / "go").touch()
    wait_for(lambda: record_of(job, "program").get("code") == 0)
    assert (judge(job).state, judge(job).unsupervised) == ("running", True)
    os.kill(record_of(job, "trainer")["pid"], 9)
    status = end_of(job)
    assert (status.state, status.code) == ("succeeded", 0)


# --- GPUs -------------------------------------------------------------------------------------------------------------


def on_gpus(*shares: tuple[str, ...]) -> Plan:
    """A role for every share; the first one has none."""
    code = WHERE + "print(os.environ['CUDA_VISIBLE_DEVICES'])"
    on_cpu = role("trainer", WAITS)
    on_gpu = role("program", code, env={"CUDA_VISIBLE_DEVICES": [{"slot": "gpus"}]})
    return plan_of(on_cpu, on_gpu._replace(nodes=tuple(Devices("cuda", share) for share in shares)))


@pytest.mark.parametrize(
    ("shares", "wanted", "visible", "expected"),
    [
        ([("0", "1")], ("0", "1"), "0,1", ["", "0,1"]),
        ([("3",), ("1", "0")], ("3", "1", "0"), "3,1,0", ["", "3", "1,0"]),
        ([("auto:1",), ("auto:2",)], ("auto:3",), "2,5,7", ["", "2", "5,7"]),
    ],
)
def test_each_group_sees_its_share_of_the_one_claim(shares: Any, wanted: Any, visible: str, expected: Any) -> None:
    plan = on_gpus(*shares)
    claimed = wanted_gpus(plan)
    assert claimed is not None and claimed.gpus == wanted
    assert [visible_to(plan, group, visible) for group in groups_of(plan)] == expected


def test_processes_of_a_group_see_its_share_of_the_gpus(tmp_path: Path) -> None:
    plan = on_gpus(("3",), ("1", "0"))
    held = InheritedClaim(Claim(SHARED, "groups", ("GPU-3", "GPU-1", "GPU-0")), "3,1,0")
    job = begin(tmp_path, plan, held=held)
    for node, share in enumerate(["3", "1,0"]):
        said(job, f"up in program/node{node}\n{share}\n", f"program/node{node}/rank_0.log")
    slots = {folder: group.slots.get("gpus") for folder, group in by_folder(judge(job)).items()}
    assert slots == {"trainer": None, "program/node0": "3", "program/node1": "1,0"}
    (Path(job.code) / "go").touch()
    assert end_of(job).state == "succeeded"
