"""The supervisor with real processes: exit truth, environment, stop, sweep, and its own death."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from deployer.agent import rank
from deployer.agent.host.errors import AgentError
from deployer.agent.host.layout import (
    AGENT_DIR,
    ATTEMPT_ENV,
    CACHE_ENV,
    JOB_ID_ENV,
    RUN_DIR_ENV,
    STARTED_ENV,
    Job,
)
from deployer.agent.host.marks import job_processes
from deployer.agent.host.processes import Process, command_of
from deployer.agent.job.judge import judge
from deployer.agent.job.status import PREPARING, Status, read_status, with_group, write_status
from deployer.agent.job.stop import request_stop
from deployer.agent.supervisor.start import adopt
from tests.support.ferry import REPO
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
    torchrun,
    wait_for,
)
from tests.support.limits import FOREVER_S, HANG_S, PATIENCE
from trainer import schema

# --- the environment --------------------------------------------------------------------------------------------------


def test_names_in_the_environment_are_those_of_the_trainer() -> None:
    assert (STARTED_ENV, CACHE_ENV) == (schema.STARTED_ENV, schema.CACHE_ENV)


def test_rank_wrapper_uses_the_names_of_the_layout() -> None:
    assert (rank.RUN_DIR_ENV, rank.ATTEMPT_ENV) == (RUN_DIR_ENV, ATTEMPT_ENV)


# --- one process -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("print('fine')", ("succeeded", 0, None, None)),
        ("import sys; sys.exit(7)", ("failed", 7, 0, None)),
        ("import os; os._exit(3)", ("failed", 3, 0, None)),
        ("import os; os.kill(os.getpid(), 9)", ("failed", 137, 0, 9)),
    ],
)
def test_exit_of_a_program_is_the_jobs(tmp_path: Path, code: str, expected: tuple[Any, ...]) -> None:
    status = run_job(tmp_path, "j", make_plan(python(code)))
    assert (status.state, status.code, status.first_failing_rank, status.signal) == expected


def test_output_of_both_streams_is_kept_to_the_last_byte(tmp_path: Path) -> None:
    job = make_job(tmp_path, "j", make_plan([]))
    end_of(start(job, make_plan(["/bin/sh", "-c", r"printf 'one\n'; printf 'bar\r' >&2; printf last; exit 4"])))
    assert log_of(job) == "one\nbar\rlast"
    assert judge(job).code == 4


def test_missing_program_gives_127_and_says_so_in_the_log(tmp_path: Path) -> None:
    plan = make_plan(["/no/such/program"])
    job = start(make_job(tmp_path, "j", plan), plan)
    assert end_of(job).code == 127
    assert log_of(job) == "cannot start /no/such/program: No such file or directory\n"


def test_missing_working_folder_fails_as_the_tools_error(tmp_path: Path) -> None:
    status = run_job(tmp_path, "j", make_plan(python("pass"), cwd="/no/such/folder"))
    assert (status.state, status.code) == ("failed", 125)
    assert "/no/such/folder" in status.reason


def test_values_reach_the_job_unchanged_and_secrets_no_file(tmp_path: Path) -> None:
    values = {"A": " $(touch x) 'q' \"d\" `b`\n;&é", "EMPTY": "", "LONG": "y" * 100_000, "ODD": "\udcff"}
    code = "import os, json; print(json.dumps([os.environ[k] for k in ('A', 'EMPTY', 'LONG', 'ODD', 'TOKEN')]))"
    plan = make_plan(python(code))
    job = start(make_job(tmp_path, "j", plan), plan, env=values, secrets={"TOKEN": "s3cr" + "et-value"})
    assert end_of(job).code == 0
    assert json.loads(log_of(job)) == [*values.values(), "s3cret-value"]
    files = [p for p in Path(job.path).rglob("*") if p.is_file() and p.name != "rank_0.log"]
    assert not [p for p in files if b"s3cret-value" in p.read_bytes()]


def test_running_status_names_slots_command_and_processes(tmp_path: Path) -> None:
    plan = make_plan(python("import time; print('up'); time.sleep(1000)", "a b"))
    job = start(make_job(tmp_path, "j", plan), plan)
    said(job, "up")
    status = judge(job)
    (group,) = status.groups
    assert (status.state, group.slots["python"], group.argv[-1]) == ("running", sys.executable, "a b")
    pid = json.loads((Path(job.ranks(1)) / "rank_0.json").read_text())["pid"]
    cmdline = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]
    assert [part.decode() for part in cmdline] == list(group.argv)
    assert f"{JOB_ID_ENV}=j".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    request_stop(job, 60)
    assert end_of(job).state == "stopped"


def test_files_of_a_job_are_private(tmp_path: Path) -> None:
    plan = make_plan(python("open('made', 'w')"))
    job = start(make_job(tmp_path, "j", plan), plan)
    end_of(job)
    written = [job.status, job.supervisor_log, f"{job.logs(1)}/rank_0.log", f"{job.code}/made"]
    assert [oct(Path(path).stat().st_mode & 0o777) for path in written] == ["0o600"] * 4


def test_supervisor_that_cannot_start_is_an_error(tmp_path: Path) -> None:
    job = make_job(tmp_path, "j", make_plan([]))
    with Path(job.control, "supervisor.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as another supervisor of it does
        with pytest.raises(AgentError, match="did not start: the job has a supervisor already"):
            start(job, make_plan(python("pass")))


# --- torchrun --------------------------------------------------------------------------------------------------------

BOTH_UP = """
import os, sys, time
rank = os.environ['RANK']
print('rank', rank)
open('up' + rank, 'w')
while not (os.path.exists('up0') and os.path.exists('up1')):
    time.sleep(0.01)
"""
SAVES_AFTER_TERM = """
import os, signal, sys, time
SECONDS = %g
def save(*_):
    time.sleep(SECONDS)
    open('saved', 'w').write('all of it')
    sys.exit(0)
if os.environ['RANK'] == '0':
    signal.signal(signal.SIGTERM, save)
print('ready')
time.sleep(1000)
"""
DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"

TORCHRUN_JOBS: dict[str, dict[str, Any]] = {
    "exit7": torchrun(BOTH_UP + "print('last words', end='')\nsys.exit(7 if rank == '1' else 0)"),
    "kill9": torchrun(BOTH_UP + "os.kill(os.getpid(), 9) if rank == '1' else time.sleep(1000)"),
    "deaf": {
        **torchrun(BOTH_UP + "import signal\n" + DEAF + "os._exit(3) if rank == '1' else time.sleep(1000)"),
        "kind": "trainer",
    },
    "fine": torchrun(BOTH_UP),
}


@pytest.fixture(scope="module")
def long_save(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A job that was asked to stop, and one of whose ranks saves for 35 s; begun early, and waited for by the last test
    of this file."""
    return stop_while_saving(tmp_path_factory.mktemp("save"), saving_s=35, grace_s=90)


@pytest.fixture(scope="module")
def torchrun_ends(tmp_path_factory: pytest.TempPathFactory, long_save: Job) -> dict[str, tuple[Job, Status]]:
    """Each job of TORCHRUN_JOBS, run to its end; started together to share torch's import time."""
    root = tmp_path_factory.mktemp("torchrun")
    plans = {name: make_plan(**changes) for name, changes in TORCHRUN_JOBS.items()}
    jobs = {name: start(make_job(root, name, plan), plan) for name, plan in plans.items()}
    return {name: (job, end_of(job)) for name, job in jobs.items()}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("exit7", ("failed", 7, 1, None)),
        ("kill9", ("failed", 137, 1, 9)),
        ("deaf", ("failed", 3, 1, None)),
        ("fine", ("succeeded", 0, None, None)),
    ],
)
def test_first_failing_rank_of_torchrun_is_the_jobs_code(torchrun_ends: Any, name: str, expected: Any) -> None:
    _, status = torchrun_ends[name]
    assert (status.state, status.code, status.first_failing_rank, status.signal) == expected


def test_each_rank_has_its_own_log_with_its_last_words(torchrun_ends: Any) -> None:
    job, _ = torchrun_ends["exit7"]
    assert log_of(job, "rank_0.log") == "rank 0\nlast words"
    assert log_of(job, "rank_1.log") == "rank 1\nlast words"


def test_trainers_siblings_are_killed_soon_after_the_first_failure(torchrun_ends: Any) -> None:
    job, _ = torchrun_ends["deaf"]
    ends = [json.loads((Path(job.ranks(1)) / f"rank_{r}.json").read_text()) for r in (0, 1)]
    assert [e["code"] for e in ends] == [137, 3]
    assert (
        4.0 < (ends[0]["ended_mono_ns"] - ends[1]["ended_mono_ns"]) / 1e9 < 25.0 * PATIENCE
    )  # torchrun itself takes 30 s


def stop_while_saving(root: Path, *, saving_s: float, grace_s: float) -> Job:
    plan = make_plan(**torchrun(SAVES_AFTER_TERM % saving_s))
    job = start(make_job(root, "saves", plan), plan)
    said(job, "ready", "rank_0.log")
    said(job, "ready", "rank_1.log")
    request_stop(job, grace_s)
    return job


def test_stop_lets_a_rank_save_though_its_sibling_has_died(tmp_path: Path) -> None:
    job = stop_while_saving(tmp_path, saving_s=3, grace_s=FOREVER_S)
    status = end_of(job)
    assert (status.state, status.remaining, status.gpus_free) == ("stopped", (), None)
    assert (Path(job.code) / "saved").read_text() == "all of it"
    assert status.code == 143  # of rank 1, which has no handler


def test_stop_before_the_ranks_have_started_does_not_wait_for_the_grace(tmp_path: Path) -> None:
    plan = make_plan(**torchrun(BOTH_UP), kind="trainer")
    job = start(make_job(tmp_path, "j", plan), plan)
    wait_for(lambda: judge(job).state == "running")  # torchrun itself imports torch for seconds
    request_stop(job, FOREVER_S)
    assert (end_of(job).state, log_of(job), log_of(job, "rank_1.log")) == ("stopped", "", "")


# --- stop and sweep --------------------------------------------------------------------------------------------------

DEAF_TREE = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    print('daemon', os.getpid())
    time.sleep(1000)
subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'], env={}, start_new_session=True)
print('main')
time.sleep(1000)
"""


def leftovers(job: Job) -> list[Process]:
    return job_processes(job)


def test_stop_ends_what_ignores_it_or_has_left_the_session(tmp_path: Path) -> None:
    plan = make_plan(python(DEAF_TREE))
    job = start(make_job(tmp_path, "j", plan), plan)
    said(job, "main"), said(job, "daemon")
    began = time.monotonic()
    request_stop(job, 1)
    status = end_of(job)
    assert time.monotonic() - began < 60 * PATIENCE  # the grace and the bound of a stop are 3 s; the usual grace is 120
    assert (status.state, status.code, status.swept, status.remaining) == ("stopped", 137, 2, ())
    assert leftovers(job) == []


def test_stop_of_one_job_leaves_its_twin_alone(tmp_path: Path) -> None:
    plan = make_plan(python("import time; print('up'); time.sleep(1000)"))
    one, two = (start(make_job(tmp_path, name, plan), plan) for name in ("j", "j2"))
    said(one, "up"), said(two, "up")
    request_stop(one, 0)
    assert (end_of(one).state, judge(two).state, len(leftovers(two))) == ("stopped", "running", 2)
    request_stop(two, 0)
    assert end_of(two).state == "stopped"


def test_daemon_of_a_finished_job_is_swept(tmp_path: Path) -> None:
    code = "import subprocess; subprocess.Popen(['sleep', '1000'], start_new_session=True)"
    status = run_job(tmp_path, "j", make_plan(python(code)))
    assert (status.state, status.swept, status.remaining) == ("succeeded", 1, ())


def test_trainer_is_stopped_by_the_flag_and_gets_no_signal(tmp_path: Path) -> None:
    code = """
import os, signal, time
signal.signal(signal.SIGTERM, lambda *_: print('TERM'))
print('up')
while not os.path.exists(os.environ['TORCHFERRY_RUN_DIR'] + '/control/stop.json'):
    time.sleep(0.01)
time.sleep(1)
print('saved')
"""
    plan = make_plan(python(code), kind="trainer")
    job = start(make_job(tmp_path, "j", plan), plan)
    said(job, "up")
    request_stop(job, FOREVER_S)
    status = end_of(job)
    assert (status.state, status.code, log_of(job)) == ("stopped", 0, "up\nsaved\n")


def test_term_to_the_supervisor_is_a_stop(tmp_path: Path) -> None:
    code = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(5)); print('up'); time.sleep(1000)"
    plan = make_plan(python(code))
    job = start(make_job(tmp_path, "j", plan), plan)
    said(job, "up")
    os.kill(supervisor_pid(job), signal.SIGTERM)
    status = end_of(job)
    assert (status.state, status.code, status.grace_s) == ("stopped", 5, 120.0)


def test_stop_before_the_start_starts_nothing(tmp_path: Path) -> None:
    plan = make_plan(python("open('ran', 'w')"))
    job = make_job(tmp_path, "j", plan)
    request_stop(job, 0)
    status = end_of(start(job, plan))
    assert (status.state, status.code, list(Path(job.code).iterdir())) == ("stopped", None, [])


def test_stop_ends_a_preparation_that_takes_long(tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nsleep 1000\n")
    slow.chmod(0o700)
    plan = make_plan(python("open('ran', 'w')"))
    plan["python"]["explicit"] = str(slow)
    job = start(make_job(tmp_path, "j", plan), plan)
    wait_for(lambda: [p for p in leftovers(job) if "sleep" in command_of(p.pid)])
    request_stop(job, 0)
    status = end_of(job)
    assert (status.state, status.remaining, list(Path(job.code).iterdir())) == ("stopped", (), [])
    assert leftovers(job) == []


def test_shorter_grace_replaces_a_longer_one(tmp_path: Path) -> None:
    plan = make_plan(python("import signal, time\n" + DEAF + "print('up')\ntime.sleep(1000)"))
    job = start(make_job(tmp_path, "j", plan), plan)
    said(job, "up")
    request_stop(job, FOREVER_S)
    wait_for(lambda: judge(job).phase == "stopping")
    request_stop(job, 0)
    assert end_of(job).code == 137


# --- the supervisor's death ------------------------------------------------------------------------------------------

WAITS_FOR_GO = GO + "print('over')\nsys.exit(%d)"


def start_and_kill_supervisor(root: Path, job_id: str, code: int) -> Job:
    job = run_up(root, job_id, WAITS_FOR_GO % code)
    kill_supervisor(job)
    return job


@pytest.mark.parametrize(("code", "expected"), [(0, "succeeded"), (9, "failed")])
def test_ranks_outlive_their_supervisor_and_their_end_is_known(tmp_path: Path, code: int, expected: str) -> None:
    job = start_and_kill_supervisor(tmp_path, "j", code)
    status = judge(job)
    assert (status.state, status.unsupervised) == ("running", True)
    (Path(job.code) / "go").touch()
    status = end_of(job)
    assert (status.state, status.code, log_of(job)) == (expected, code, "up\nover\n")
    assert read_status(job) == status


def test_rank_killed_with_its_wrapper_and_supervisor_is_lost(tmp_path: Path) -> None:
    job = start_and_kill_supervisor(tmp_path, "j", 0)
    found = json.loads((Path(job.ranks(1)) / "rank_0.json").read_text())
    os.kill(found["wrapper"]["pid"], signal.SIGKILL)
    status = end_of(job)
    assert (status.state, status.code) == ("lost", 125)
    wait_for(lambda: not leftovers(job))  # the program went with its wrapper


def test_adopted_job_can_be_stopped(tmp_path: Path) -> None:
    job = start_and_kill_supervisor(tmp_path, "j", 0)
    adopt(job)
    status = judge(job)
    assert (status.state, status.unsupervised) == ("running", False)
    request_stop(job, 60)
    status = end_of(job)
    assert (status.state, status.code, status.remaining) == ("stopped", 143, ())


def test_program_of_a_supervisor_killed_before_it_noted_it_counts_as_running(tmp_path: Path) -> None:
    job = start_and_kill_supervisor(tmp_path, "j", 0)
    status = with_group(judge(job), "", main=None)
    write_status(job, status._replace(state=PREPARING))
    shutil.rmtree(job.ranks(1))
    assert judge(job).state == "running"
    (Path(job.code) / "go").touch()
    assert end_of(job).state == "lost"


def test_second_supervisor_of_a_job_refuses(tmp_path: Path) -> None:
    plan = make_plan(python(WAITS_FOR_GO % 0))
    job = start(make_job(tmp_path, "j", plan), plan)
    said(job, "up")
    with pytest.raises(AgentError, match="has a supervisor already"):
        start(job, plan)
    (Path(job.code) / "go").touch()
    assert end_of(job).state == "succeeded"


SPAWNS_AND_DIES = """
import os, signal, sys
from deployer.agent.supervisor.start import LaunchInput, spawn
from deployer.agent.host.layout import Job
from deployer.agent.job.record import read_plan
for path in sys.argv[1:]:
    spawn(Job(path), LaunchInput(read_plan(Job(path)), 1, base_env=dict(os.environ)))
os.killpg(0, signal.SIGKILL)
"""


def test_jobs_outlive_the_agent_and_its_process_group(tmp_path: Path) -> None:
    plan = make_plan(python(WAITS_FOR_GO % 0))
    jobs = [make_job(tmp_path, f"j{i}", plan) for i in range(5)]
    argv = [sys.executable, "-c", SPAWNS_AND_DIES, *(job.path for job in jobs)]
    agent = subprocess.run(argv, start_new_session=True, cwd=REPO, check=False)
    assert agent.returncode == -signal.SIGKILL
    for job in jobs:
        said(job, "up")
        (Path(job.code) / "go").touch()
    assert [end_of(job).state for job in jobs] == ["succeeded"] * 5


def test_ten_jobs_at_once_each_have_their_own_end(tmp_path: Path) -> None:
    plans = {f"j{i}": make_plan(python(WAITS_FOR_GO % i)) for i in range(10)}
    jobs = [start(make_job(tmp_path, name, plan), plan) for name, plan in plans.items()]
    for job in jobs:
        said(job, "up")
    assert {judge(job).state for job in jobs} <= {"running", "preparing"}
    for job in jobs:
        (Path(job.code) / "go").touch()
    assert [end_of(job).code for job in jobs] == list(range(10))


# --- the wrapper by hand ---------------------------------------------------------------------------------------------


def test_wrapper_without_a_run_folder_becomes_the_program(tmp_path: Path) -> None:
    env = {k: v for k, v in os.environ.items() if k != RUN_DIR_ENV}
    argv = [sys.executable, f"{AGENT_DIR}/rank.py", "-c", "import os; print('hello', os.getpid())"]
    process = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, cwd=tmp_path)
    out, _ = process.communicate(timeout=HANG_S)
    assert (out.decode(), list(tmp_path.iterdir())) == (f"hello {process.pid}\n", [])


def test_stop_lets_a_rank_save_for_longer_than_the_30_s_that_torchrun_would_give_it(long_save: Job) -> None:
    assert end_of(long_save).state == "stopped"
    assert (Path(long_save.code) / "saved").read_text() == "all of it"
