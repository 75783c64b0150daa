"""True states of real jobs whose supervisor, host or clock let them down: each ends rightly, with the reason."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from deployer.agent.host.layout import Job, Root
from deployer.agent.host.locks import is_held
from deployer.agent.host.processes import Process, is_running
from deployer.agent.job import ending
from deployer.agent.job.ending import read_ranks
from deployer.agent.job.judge import judge
from deployer.agent.job.status import RUNNING, Status, read_status, write_status
from deployer.agent.job.stop import StopRequest, read_stop, request_stop
from deployer.agent.requests.jobs import adopt_all
from tests.support import stubborn
from tests.support.ferry import Ferry
from tests.support.jobs import (
    GO,
    end_of,
    kill_supervisor,
    log_of,
    make_job,
    make_plan,
    python,
    run_job,
    run_up,
    said,
    start,
    supervisor_pid,
    wait_for,
)
from tests.support.limits import FOREVER_S, HANG_S
from tests.support.stubborn import running

GO_AND_EXIT = GO + "sys.exit(%d)"


# --- adoption --------------------------------------------------------------------------------------------------------


def test_any_command_that_comes_to_the_host_adopts_its_unsupervised_jobs(ferry: Ferry) -> None:
    job = run_up(ferry.root, "j", GO_AND_EXIT % 9)
    there = ferry.where()
    other = ("run", *there, "--detach", "--python", sys.executable, "--", "python", "-c", "pass")
    for words in (("ps", *there), ("status", "j", *there), ("logs", "j", "--no-follow", *there), other):
        wait_for(lambda: not any(is_held(str(agent)) for agent in (ferry.root / "agent").glob("*")))  # none adopts now
        kill_supervisor(job)
        now = judge(job)
        assert now.unsupervised is True, now
        assert ferry.run(*words).returncode == 0
        wait_for(lambda: not judge(job).unsupervised)
    (Path(job.code) / "go").touch()
    status = end_of(job)
    assert (status.state, status.code, log_of(job)) == ("failed", 9, "up\n")


def test_adopted_job_keeps_its_restarts(tmp_path: Path) -> None:
    code = "import os, sys, time\nprint('up')\nn = os.environ['TORCHFERRY_ATTEMPT']\n"
    code += "while n == '1' and not os.path.exists('go'): time.sleep(0.02)\nsys.exit(9 if n == '1' else 0)"
    job = run_up(tmp_path, "again", code, policy={"max_restarts": 1})
    kill_supervisor(job)
    adopt_all(Root(str(tmp_path)), within_s=HANG_S)
    (Path(job.code) / "go").touch()
    status = end_of(job)
    assert (status.state, [a.code for a in status.attempts]) == ("succeeded", [9, 0])


def test_adopted_job_whose_secrets_went_with_its_supervisor_is_not_restarted(tmp_path: Path) -> None:
    job = run_up(tmp_path, "secret", GO_AND_EXIT % 9, policy={"max_restarts": 1}, secret_names=["TOKEN"])
    kill_supervisor(job)
    adopt_all(Root(str(tmp_path)), within_s=HANG_S)
    (Path(job.code) / "go").touch()
    status = end_of(job)
    assert (status.state, status.code) == ("failed", 9) and "secrets" in status.reason


def test_adoption_passes_over_broken_and_ended_jobs_and_those_of_other_machines(tmp_path: Path) -> None:
    ended = run_job(tmp_path, "ended", make_plan(python("pass")))
    (Path(make_job(tmp_path, "broken", make_plan([])).path) / "status.json").write_text('{"state": "running"}')
    assert ended.supervisor is not None
    elsewhere = ended.supervisor._replace(machine_id="other")
    foreign = ended._replace(state=RUNNING, supervisor=elsewhere, job="foreign")
    write_status(make_job(tmp_path, "foreign", make_plan([])), foreign)
    job = run_up(tmp_path, "job", GO_AND_EXIT % 0)
    kill_supervisor(job)
    adopt_all(Root(str(tmp_path)), within_s=HANG_S)
    assert not judge(job).unsupervised
    assert read_status(Root(str(tmp_path)).job("ended")) == ended
    assert read_status(Root(str(tmp_path)).job("foreign")) == foreign
    (Path(job.code) / "go").touch()
    assert end_of(job).state == "succeeded"


def test_supervisor_writes_its_status_again_when_somebody_has_changed_it(tmp_path: Path) -> None:
    job = run_up(tmp_path, "j", GO_AND_EXIT % 0)
    before = read_status(job)
    for damage in (Path(job.status).unlink, lambda: Path(job.status).write_text("[]")):
        damage()
        wait_for(lambda: read_status(job) == before)
    (Path(job.code) / "go").touch()
    assert end_of(job).state == "succeeded"


def test_supervisor_that_was_halted_and_goes_on_does_not_stop_its_job(tmp_path: Path) -> None:
    job = run_up(tmp_path, "j", GO_AND_EXIT % 0)
    supervisor = supervisor_pid(job)
    for _ in range(3):
        os.kill(supervisor, signal.SIGSTOP)
        time.sleep(0.3)  # longer than it waits for a signal
        os.kill(supervisor, signal.SIGCONT)
        time.sleep(0.1)
    (Path(job.code) / "go").touch()
    assert (end_of(job).state, read_stop(job)) == ("succeeded", None)


def test_job_whose_last_word_is_false_goes_on_without_its_supervisor(tmp_path: Path) -> None:
    job = run_up(tmp_path, "j", GO_AND_EXIT % 3)
    kill_supervisor(job)
    written = read_status(job)
    assert written is not None
    write_status(job, written._replace(state="failed", code=1, reason="so they say", ended_at="2026-01-02T03:04:05Z"))
    adopt_all(Root(str(tmp_path)), within_s=HANG_S)  # which would end what an ended job has left running
    now = judge(job)
    assert (now.state, now.unsupervised, now.reason, now.ended_at) == ("running", False, "", None)
    (Path(job.code) / "go").touch()
    assert end_of(job).code == 3


# --- a supervisor killed in each phase -------------------------------------------------------------------------------


def preparing(root: Path) -> Job:
    slow = root / "slow"
    slow.write_text("#!/bin/sh\necho up; sleep 1000\n")
    slow.chmod(0o700)
    plan = make_plan(python("open('ran', 'w')"), python={"explicit": str(slow)})
    job = start(make_job(root, "j", plan), plan)
    wait_for(lambda: running(str(slow)))
    return job


def at_work(root: Path) -> Job:
    return run_up(root, "j", GO_AND_EXIT % 0)


def stopping(root: Path) -> Job:
    code = "import signal, sys, time\ndef save(*_):\n    print('saving'); time.sleep(1); sys.exit(0)\n"
    job = run_up(root, "j", code + "signal.signal(15, save)\nprint('up')\nwhile True: time.sleep(1)")
    request_stop(job, FOREVER_S)
    said(job, "saving")
    return job


def finishing(root: Path) -> Job:
    code = f"HEAD = {stubborn.HEAD!r}\nimport sys\nsys.argv.append({str(root)!r})\nexec(HEAD)\n"
    job = run_up(root, "j", code + stubborn.PARTS["deaf worker"] + GO)
    (Path(job.code) / "go").touch()
    wait_for(lambda: '"code": 0' in (Path(job.ranks(1)) / "rank_0.json").read_text())
    return job


@pytest.mark.parametrize(
    ("phase", "then", "expected"),
    [
        (preparing, None, ("lost", 125, "the launch did not complete: its supervisor")),
        (at_work, "go", ("succeeded", 0, "exited with code 0")),
        (at_work, "kill", ("lost", 125, "left no exit record")),
        (stopping, None, ("stopped", 0, "stopped on request")),
        (finishing, None, ("succeeded", 0, "exited with code 0")),
    ],
    ids=["preparing", "running", "running, then all killed", "stopping", "finishing"],
)
def test_job_whose_supervisor_was_killed_ends_in_the_right_state(
    tmp_path: Path, phase: Any, then: str | None, expected: Any
) -> None:
    job = phase(tmp_path)
    kill_supervisor(job)
    if then == "kill":
        rank = json.loads((Path(job.ranks(1)) / "rank_0.json").read_text())
        os.kill(rank["wrapper"]["pid"], signal.SIGKILL)
    adopt_all(Root(str(tmp_path)), within_s=HANG_S)
    if then == "go":
        (Path(job.code) / "go").touch()
    status = end_of(job)
    assert (status.state, status.code) == expected[:2] and expected[2] in status.reason
    adopt_all(Root(str(tmp_path)), within_s=HANG_S)
    wait_for(lambda: not running(str(tmp_path)))  # nothing is left, the deaf worker of `finishing` neither


# --- reboots and clocks ----------------------------------------------------------------------------------------------


def reboot(job: Job) -> None:
    """As a reboot leaves it: no process, and a status of another boot."""
    status = judge(job)
    kill_supervisor(job)
    for pid in [rank.wrapper.pid for rank in read_ranks(job, 1)]:
        os.kill(pid, signal.SIGKILL)
    write_status(job, of_another_boot(status))


def of_another_boot(status: Status) -> Status:
    assert status.supervisor is not None
    return status._replace(supervisor=status.supervisor._replace(boot_id="11111111-2222-3333-4444-555555555555"))


def test_job_from_before_a_reboot_is_lost_with_the_way_to_resume_it(ferry: Ferry) -> None:
    job = run_up(ferry.root, "j", GO_AND_EXIT % 0)
    reboot(job)
    done = ferry.run("status", "j", *ferry.where())
    assert b"the host was rebooted" in done.stdout and b"resume j" in done.stderr
    followed = ferry.run("logs", "j", "-f", *ferry.where())
    assert (followed.returncode, followed.stdout) == (125, b"up\n") and b"rebooted" in followed.stderr


def test_job_that_had_ended_before_the_reboot_keeps_its_end(tmp_path: Path) -> None:
    status = run_job(tmp_path, "j", make_plan(python("import sys; sys.exit(7)")))
    assert status.supervisor is not None
    supervisor = Process(status.supervisor.pid, status.supervisor.start_time)
    wait_for(lambda: not is_running(supervisor))  # it ends a moment after its last word
    job = Root(str(tmp_path)).job("j")
    write_status(job, of_another_boot(status)._replace(state=RUNNING, code=None, reason=""))
    assert (judge(job).state, judge(job).code) == ("failed", 7)


@pytest.mark.soak
def test_twenty_reboots_leave_no_wrong_state(tmp_path: Path) -> None:
    chance = random.Random(20)
    for number in range(20):
        code, has_ended = chance.choice([0, 3]), chance.random() < 0.5
        job = run_up(tmp_path, f"j{number}", GO_AND_EXIT % code)
        if has_ended:
            kill_supervisor(job)
            (Path(job.code) / "go").touch()
            wait_for(lambda job=job: '"code": ' in (Path(job.ranks(1)) / "rank_0.json").read_text())
            wait_for(lambda job=job: not running(job.path))
            written = read_status(job)
            assert written is not None
            write_status(job, of_another_boot(written))
            expected = ("succeeded" if code == 0 else "failed", code)
        else:
            reboot(job)
            expected = ("lost", 125)
        status = judge(job)
        assert (status.state, status.code) == expected, number
        assert not running(job.path)


@pytest.mark.parametrize("jump_s", [-86400, 86400])
def test_clock_that_jumped_between_end_and_stop_changes_no_verdict(jump_s: float) -> None:
    now = time.monotonic()
    wall_ns = int((time.time() + jump_s) * 1e9)
    failed = ending.RankRecord(0, 1, 1, Process(1, 1), 7, None, wall_ns, int((now - 5) * 1e9))
    stop = StopRequest(1, time.time(), now, now + 1)
    found = ending.decide_ending(ending.Evidence([failed], [ending.GroupEnd(1, launcher_code=7)], stop))
    assert found is not None and (found.state, found.code) == ("failed", 7)


@pytest.mark.parametrize("jump_s", [-86400, 86400])
def test_clock_that_jumped_during_a_stop_changes_no_grace(tmp_path: Path, jump_s: float) -> None:
    job = make_job(tmp_path, "j", make_plan([]))
    request = request_stop(job, 30)
    data = json.loads(Path(job.stop).read_text())
    Path(job.stop).write_text(json.dumps({**data, "requested_at": data["requested_at"] + jump_s}))
    kept = read_stop(job)
    assert kept is not None and kept.deadline_mono == request.deadline_mono
    assert request_stop(job, 60).deadline_mono == request.deadline_mono


def test_folder_without_a_status_from_the_future_was_never_launched(tmp_path: Path) -> None:
    job = make_job(tmp_path, "j", make_plan([]))
    os.utime(job.path, (time.time() + 86400,) * 2)
    assert judge(job).state == "lost"


def test_verdict_that_cannot_be_written_is_told_all_the_same(tmp_path: Path) -> None:
    job = run_up(tmp_path, "j", GO_AND_EXIT % 0)
    reboot(job)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))  # as on a full disk, nothing can be written
    try:
        told = judge(job)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (told.state, told.reason) == ("lost", "the host was rebooted")
    assert json.loads(Path(job.status).read_text())["state"] == "running"
