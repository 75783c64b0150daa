"""The truth about jobs, judged from their folders; and processes told apart by start time."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deployer.agent.gc.inventory import read_inventory
from deployer.agent.host.files import write_json
from deployer.agent.host.layout import TIMES_FILE, Job, Root
from deployer.agent.host.machine import Identity, own_identity
from deployer.agent.host.marks import job_processes
from deployer.agent.host.processes import Process, is_running, process_of, send
from deployer.agent.job.ending import read_ranks
from deployer.agent.job.judge import judge
from deployer.agent.job.progress import last_metrics, last_step
from deployer.agent.job.status import read_status
from deployer.agent.job.stop import read_stop, request_stop
from deployer.agent.logs.times import read_index
from deployer.agent.requests.jobs import list_jobs
from tests.support.jobs import make_job, make_plan, wait_for

Marked = Callable[..., Process]


@pytest.fixture
def marked() -> Iterator[Marked]:
    """Starts a process that sleeps with these in its environment."""
    started = []

    def start(**env: str) -> Process:
        child = subprocess.Popen(["sleep", "1000"], env=env)
        started.append(child)
        wait_for(lambda: Path(f"/proc/{child.pid}/comm").read_text() == "sleep\n")
        return process_of(child.pid)

    yield start
    for child in started:
        child.kill()
        child.wait()


def folder_of(root: Path) -> str:
    return str(root / "jobs" / "j")


def ended_process() -> Process:
    child = subprocess.Popen(["sleep", "1000"])
    process = process_of(child.pid)
    child.kill()
    child.wait()
    return process


def identity_of(process: Process, **changes: Any) -> Identity:
    own = own_identity()._replace(pid=process.pid, start_time=process.start_time)
    return own._replace(**changes)


def job_with(root: Path, supervisor: Identity, /, **status: Any) -> Job:
    """`status`: what else its status.json says, as JSON."""
    job = make_job(root, "j", make_plan([]))
    plain = {"state": "running", "attempt": 1, "nproc": 1, "supervisor": supervisor._asdict()}
    write_json(job.status, {**plain, **status})
    Path(job.ranks(1)).mkdir(parents=True)
    return job


def write_rank(job: Job, number: int, process: Process, /, **ended: Any) -> None:
    wrapper = ended_process()._asdict()
    record = {"rank": number, "local_rank": number, "wrapper": wrapper, **process._asdict(), **ended}
    (Path(job.ranks(1)) / f"rank_{number}.json").write_text(json.dumps(record))


# --- processes -------------------------------------------------------------------------------------------------------


def test_same_pid_with_another_start_time_is_another_process() -> None:
    me = process_of(os.getpid())
    assert is_running(me)
    assert not is_running(me._replace(start_time=me.start_time + 1))
    assert not send(me._replace(start_time=me.start_time + 1), 9)


def test_zombie_is_not_running() -> None:
    child = subprocess.Popen(["true"])
    process = process_of(child.pid)
    wait_for(lambda: not is_running(process))
    assert process_of(child.pid) == process  # still there, not reaped
    child.wait()


def test_folder_in_the_mark_is_matched_whole(marked: Marked) -> None:
    process = marked(TORCHFERRY_JOB_ID="job-12", TORCHFERRY_RUN_DIR="/tf/jobs/job-12")
    assert job_processes(Job("/tf/jobs/job-12")) == [process]
    assert job_processes(Job("/tf/jobs/job-1")) == job_processes(Job("/other/jobs/job-12")) == []


# --- judge -----------------------------------------------------------------------------------------------------------


def test_job_of_a_living_supervisor_is_as_written(tmp_path: Path, marked: Marked) -> None:
    job = job_with(tmp_path, identity_of(marked(TORCHFERRY_SUPERVISES=folder_of(tmp_path))))
    assert judge(job) == read_status(job)


@pytest.mark.parametrize("state", ["failed", "succeeded", "stopped", "lost"])
def test_last_word_is_not_believed_while_the_job_runs(tmp_path: Path, marked: Marked, state: str) -> None:
    run_dir = {"TORCHFERRY_RUN_DIR": folder_of(tmp_path)}
    supervisor, main = marked(TORCHFERRY_SUPERVISES=folder_of(tmp_path)), marked(**run_dir)
    said = {"state": state, "code": 1, "main": main._asdict()}
    job = job_with(tmp_path, identity_of(supervisor), **said)
    assert (judge(job).state, judge(job).unsupervised) == ("running", False)
    assert f"has ended, {state}; 2 processes of it run" in judge(job).warnings[0]
    write_json(job.status, {**said, "attempt": 1, "supervisor": identity_of(ended_process())._asdict()})
    assert (judge(job).state, judge(job).unsupervised) == ("running", False)  # which is told by its own mark
    os.kill(supervisor.pid, 9)
    wait_for(lambda: not is_running(supervisor))
    assert (judge(job).state, judge(job).unsupervised) == ("running", True)
    os.kill(main.pid, 9)
    wait_for(lambda: not is_running(main))
    assert judge(job) == read_status(job)


def test_last_word_of_a_living_supervisor_says_how_much_it_swept(tmp_path: Path, marked: Marked) -> None:
    supervisor = identity_of(marked(TORCHFERRY_SUPERVISES=folder_of(tmp_path)))
    job = job_with(tmp_path, supervisor, state="failed")
    assert judge(job).state == "running"
    write_json(job.status, {"state": "failed", "attempt": 1, "supervisor": supervisor._asdict(), "swept": 0})
    assert judge(job) == read_status(job)


def test_last_word_is_believed_of_what_could_not_be_ended(tmp_path: Path, marked: Marked) -> None:
    main = marked(TORCHFERRY_RUN_DIR=folder_of(tmp_path))
    said = {"state": "stopped", "main": main._asdict(), "remaining": [main._asdict()]}
    job = job_with(tmp_path, identity_of(ended_process()), **said)
    assert judge(job) == read_status(job)


def test_job_of_another_machine_is_shown_as_written_with_its_host(tmp_path: Path) -> None:
    job = job_with(tmp_path, identity_of(ended_process(), machine_id="other", hostname="gpu7"))
    status = judge(job)
    assert (status.state, status.on_host) == ("running", "gpu7")
    written = read_status(job)
    assert written is not None and written.state == "running"


def test_supervisor_pid_that_was_given_away_is_no_supervisor(tmp_path: Path) -> None:
    me = process_of(os.getpid())
    job = job_with(tmp_path, identity_of(me._replace(start_time=me.start_time - 1)))
    assert judge(job).state == "lost"


def test_supervisor_pid_and_time_of_a_process_without_its_mark_is_none(tmp_path: Path, marked: Marked) -> None:
    job = job_with(tmp_path, identity_of(marked(TORCHFERRY_SUPERVISES=folder_of(tmp_path) + "2")))
    assert judge(job).state == "lost"


def test_job_from_before_a_reboot_is_lost(tmp_path: Path) -> None:
    job = job_with(tmp_path, identity_of(process_of(os.getpid()), boot_id="another"))
    write_rank(job, 0, process_of(os.getpid()))  # a rank's pid of that boot belongs to somebody else now
    status = judge(job)
    assert (status.state, status.code, status.reason) == ("lost", 125, "the host was rebooted")


def test_launch_whose_supervisor_died_did_not_complete(tmp_path: Path) -> None:
    job = job_with(tmp_path, identity_of(ended_process()), state="preparing")
    assert "did not complete" in judge(job).reason


def test_living_rank_without_supervisor_runs_unsupervised(tmp_path: Path, marked: Marked) -> None:
    job = job_with(tmp_path, identity_of(ended_process()))
    write_rank(job, 0, marked(TORCHFERRY_RUN_DIR=job.path))
    assert (judge(job).state, judge(job).unsupervised) == ("running", True)


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([0, 0], ("succeeded", 0, None)),
        ([1, 7], ("failed", 7, 1)),
        ([0], ("lost", 125, None)),
        ([], ("lost", 125, None)),
    ],
)
def test_end_of_an_unsupervised_job_comes_from_its_ranks(tmp_path: Path, codes: list[int], expected: Any) -> None:
    job = job_with(tmp_path, identity_of(ended_process()), nproc=2)
    for number, code in enumerate(codes):
        write_rank(job, number, ended_process(), code=code, ended_at_ns=10**18, ended_mono_ns=100 - number)
    status = judge(job)
    assert (status.state, status.code, status.first_failing_rank) == expected
    assert read_status(job) == status


def test_new_job_without_status_is_being_launched(tmp_path: Path) -> None:
    assert judge(make_job(tmp_path, "j", make_plan([]))).state == "preparing"


def test_old_job_without_status_was_never_launched(tmp_path: Path) -> None:
    job = make_job(tmp_path, "j", make_plan([]))
    os.utime(job.path, (time.time() - 3600,) * 2)
    assert judge(job).state == "lost"


def test_old_launch_that_holds_its_lock_goes_on(tmp_path: Path) -> None:
    import fcntl

    job = make_job(tmp_path, "j", make_plan([]))
    with Path(job.lock).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.utime(job.path, (time.time() - 3600,) * 2)
        assert judge(job).state == "preparing"


# --- records ---------------------------------------------------------------------------------------------------------


def test_write_replaces_whole_files_and_leaves_no_other(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    write_json(str(path), {"n": 1})
    write_json(str(path), {"n": 2})
    assert (json.loads(path.read_text()), list(tmp_path.iterdir())) == ({"n": 2}, [path])


def test_stop_requested_twice_keeps_the_first_time_and_the_nearer_deadline(tmp_path: Path) -> None:
    job = make_job(tmp_path, "j", make_plan([]))
    first = request_stop(job, 100)
    assert request_stop(job, 200) == first
    second = request_stop(job, 10)
    assert (second.grace_s, second.requested_at) == (10, first.requested_at)
    assert read_stop(job) == second


def test_stop_flag_made_by_hand_asks_for_the_default_grace(tmp_path: Path) -> None:
    job = make_job(tmp_path, "j", make_plan([]))
    Path(job.stop).touch()
    request = read_stop(job)
    assert request is not None and request.grace_s == 120.0


@pytest.mark.parametrize(
    "make",
    [os.mkfifo, os.mkdir, lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 1 << 40)],
    ids=["pipe", "folder", "huge"],
)
def test_what_is_no_file_of_ours_keeps_nobody_waiting(tmp_path: Path, make: Callable[[str], object]) -> None:
    job = make_job(tmp_path, "j", make_plan([]))
    make(job.status)
    assert re.fullmatch("its status.json is damaged: .+, and nothing of it runs", judge(job).reason)


def test_a_pipe_in_the_place_of_a_jobs_file_keeps_nobody_waiting(tmp_path: Path) -> None:
    job = make_job(tmp_path, "j", make_plan([]))
    times = Path(job.logs(1), TIMES_FILE)
    times.parent.mkdir(parents=True)
    Path(job.record).unlink()
    for path in (job.metrics, job.record, times):
        os.mkfifo(path)
    assert (last_metrics(job), last_step(job), read_index(job.logs(1))) == (None, None, [])
    (item,) = read_inventory(Root(str(tmp_path))).jobs
    assert (item.id, item.known) == ("j", False)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("status.json", '{"state": "running", "supervisor": {**, "pid": "7"}}'),
        ("status.json", '{"state": "running", "supervisor": {**, "pid": 7}, "attempt": [1], "main": {"pid": "x"}}'),
        ("status.json", "[" * 100000),
        ("job.json", '{"plan": {"gpus": 7}, "created_at": "long ago"}'),
        ("metrics.jsonl", '{"step": Infinity}\n'),
    ],
)
def test_damaged_file_of_a_job_is_told_and_keeps_nothing_from_being_listed(
    tmp_path: Path, file: str, text: str
) -> None:
    identity = json.dumps(own_identity()._replace(pid=0)._asdict())[1:-1]
    job = make_job(tmp_path, "j", make_plan([]))
    (Path(job.path) / file).write_text(text.replace("**", identity))
    (listed,) = list_jobs(Root(str(tmp_path)))
    assert listed.state == judge(job).state
    (kept,) = read_inventory(Root(str(tmp_path))).jobs
    assert kept.ended_s is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"queue": "x"}, "queue is 'x'"),
        ({"attempt": "x"}, "attempt is 'x'"),
        ({"nproc": [2]}, "nproc is [2]"),
        ({"state": {}}, "state is {}"),
        ({"supervisor": None}, "it names no supervisor"),
        ({"main": {"pid": "7", "start_time": 1}}, "main.pid is '7'"),
        ({"attempts": [{"attempt": "1"}]}, "attempts[0].attempt is '1'"),
        ({"job": "k"}, "its status.json is of another job, k"),
    ],
)
def test_status_that_cannot_be_is_not_believed_and_says_why(
    tmp_path: Path, marked: Marked, change: dict[str, Any], says: str
) -> None:
    process = marked(TORCHFERRY_RUN_DIR=folder_of(tmp_path), TORCHFERRY_ATTEMPT="3")
    job = job_with(tmp_path, identity_of(ended_process()), **change)
    now = judge(job)
    assert (now.state, now.attempt, now.unsupervised) == ("running", 3, True) and says in now.damaged
    os.kill(process.pid, 9)
    wait_for(lambda: not is_running(process))
    assert judge(job).state == "lost" and says in judge(job).reason


def test_record_of_another_jobs_rank_is_none(tmp_path: Path) -> None:
    job = job_with(tmp_path, identity_of(ended_process()))
    write_rank(job, 0, ended_process(), job="k", code=1)
    write_rank(job, 1, ended_process(), job="j", code=2)
    assert [rank.code for rank in read_ranks(job, 1)] == [2]


def test_list_has_every_folder_and_survives_broken_ones(tmp_path: Path, marked: Marked) -> None:
    root = Root(str(tmp_path))
    good = job_with(tmp_path, identity_of(marked(TORCHFERRY_SUPERVISES=folder_of(tmp_path))))
    broken = make_job(tmp_path, "broken", make_plan([]))
    Path(broken.status).write_text('{"state": "running", "supervisor": 5')
    Path(broken.record).write_bytes(b"\xff\0")
    odd = make_job(tmp_path, "odd", make_plan([]))
    Path(odd.status).write_text('{"state": "running", "supervisor": 5, "attempt": "x"}')
    Path(root.jobs, "a file").touch()
    jobs = {j.id: j for j in list_jobs(root)}
    assert {name: j.state for name, j in jobs.items()} == {"j": "running", "broken": "lost", "odd": "lost"}
    assert (jobs["j"].name, jobs["j"].nproc, jobs["j"].created) == ("test", 1, "2026-01-02T03:04:05Z")
    assert good.id == "j" and jobs["j"].host == own_identity().hostname


def test_list_of_a_root_without_jobs_is_empty(tmp_path: Path) -> None:
    assert list_jobs(Root(str(tmp_path / "none"))) == []
