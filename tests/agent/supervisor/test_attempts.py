"""Attempts under the real supervisor: restarts, limits of time, stalls, the kernel's kills, full disks."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deployer.agent.host.layout import Job
from deployer.agent.job.judge import judge
from deployer.agent.job.status import read_status
from deployer.agent.job.stop import request_stop
from deployer.agent.supervisor.start import adopt
from tests.support.ferry import REPO, Ferry
from tests.support.jobs import (
    end_of,
    kill_supervisor,
    make_job,
    make_plan,
    python,
    said,
    start,
    supervisor_pid,
    torchrun,
    wait_for,
)
from tests.support.limits import PATIENCE, patient

FAILS_ONCE = """
import os, sys
attempt = os.environ['TORCHFERRY_ATTEMPT']
print('attempt', attempt, os.environ['TOKEN'])
sys.exit(5 if attempt == '1' else 0)
"""


def policy(**limits: Any) -> dict[str, Any]:
    return {"policy": {"max_restarts": 0, "max_runtime_s": None, "stall_timeout_s": None, **limits}}


def begin(root: Path, plan: dict[str, Any], **more: Any) -> Job:
    return start(make_job(root, "attempts", plan), plan, **more)


def rank_log(job: Job, attempt: int, rank: int = 0) -> str:
    return (Path(job.logs(attempt)) / f"rank_{rank}.log").read_text()


# --- restarts --------------------------------------------------------------------------------------------------------


def test_failed_job_starts_again_with_its_own_log_records_and_secrets(tmp_path: Path) -> None:
    job = begin(tmp_path, make_plan(python(FAILS_ONCE), **policy(max_restarts=2)), secrets={"TOKEN": "hush"})
    status = end_of(job)
    assert (status.state, status.code, status.attempt, status.max_attempts) == ("succeeded", 0, 2, 3)
    assert [rank_log(job, n) for n in (1, 2)] == ["attempt 1 hush\n", "attempt 2 hush\n"]
    assert [json.loads((Path(job.ranks(n)) / "rank_0.json").read_text())["code"] for n in (1, 2)] == [5, 0]
    first, second = status.attempts
    assert (first.attempt, first.state, first.code, first.first_failing_rank) == (1, "failed", 5, 0)
    assert first.reason == "rank 0 exited with code 5"
    assert (second.attempt, second.state) == (2, "succeeded")
    times = [first.started_at, first.ended_at, second.started_at, second.ended_at]
    assert times == sorted(map(str, times))


def test_without_the_option_a_failed_job_stays_failed(tmp_path: Path) -> None:
    status = end_of(begin(tmp_path, make_plan(python(FAILS_ONCE), **policy()), secrets={"TOKEN": ""}))
    assert (status.state, status.code, status.reason) == ("failed", 5, "rank 0 exited with code 5")


def test_program_that_fails_the_same_way_twice_is_not_started_a_third_time(tmp_path: Path) -> None:
    plan = make_plan(python("import sys; print('row 7 is broken'); sys.exit(3)"), **policy(max_restarts=5))
    status = end_of(begin(tmp_path, plan))
    assert (status.state, status.code, status.attempt) == ("failed", 3, 2)
    assert status.reason == (
        "rank 0 exited with code 3; not restarted: the same error a second time, after the same last line"
    )


def test_program_that_does_not_exist_is_not_started_again(tmp_path: Path) -> None:
    status = end_of(begin(tmp_path, make_plan(["/no/such/program"], **policy(max_restarts=5))))
    assert (status.code, status.attempt) == (127, 1)
    assert status.reason.endswith("not restarted: the program was not found")


def test_daemon_of_a_failed_attempt_is_gone_before_the_next_begins(tmp_path: Path) -> None:
    code = """
import os, subprocess, sys
if os.environ['TORCHFERRY_ATTEMPT'] == '1':
    print(subprocess.Popen(['sleep', '1000'], start_new_session=True).pid)
    sys.exit(1)
pid = open(os.environ['TORCHFERRY_RUN_DIR'] + '/logs/attempt_1/rank_0.log').read().strip()
print(os.path.exists('/proc/' + pid))
"""
    job = begin(tmp_path, make_plan(python(code), **policy(max_restarts=1)))
    assert (end_of(job).swept, rank_log(job, 2)) == (1, "False\n")


def test_no_attempt_starts_where_another_account_could_have_put_the_programs(tmp_path: Path) -> None:
    code = """
import os, sys
os.chmod(os.environ['TORCHFERRY_RUN_DIR'] + '/../..', 0o777)
sys.exit(1)
"""
    job = begin(tmp_path / "root", make_plan(python(code), **policy(max_restarts=1)))
    status = end_of(job)
    assert status.state == "failed" and not Path(job.ranks(2)).exists()
    assert f"{tmp_path / 'root'} cannot be used any more: other users can write into it (mode 777)" in status.reason


def test_stop_between_two_attempts_ends_the_job(tmp_path: Path) -> None:
    plan = make_plan(python("import os, sys; print(os.urandom(8)); sys.exit(1)"), **policy(max_restarts=5))
    job = begin(tmp_path, plan)
    wait_for(lambda: judge(job).attempt == 3 and judge(job).state == "preparing")  # waits 5 s
    request_stop(job, 5)
    status = end_of(job, timeout_s=4 * PATIENCE)  # not the whole wait
    assert (status.state, status.attempt, Path(job.logs(3)).exists()) == ("stopped", 3, False)
    assert status.reason == "stopped on request, before the next attempt; rank 0 exited with code 1"


def test_earlier_outcome_of_a_trainer_does_not_become_the_next_attempts(tmp_path: Path) -> None:
    code = """
import os, sys
if os.environ['TORCHFERRY_ATTEMPT'] == '2':
    sys.exit(9)
with open(os.environ['TORCHFERRY_RUN_DIR'] + '/outcome.json', 'w') as f:
    f.write('{"state": "failed", "rank": 0, "error": "first"}')
sys.exit(1)
"""
    job = begin(tmp_path, make_plan(python(code), kind="trainer", **policy(max_restarts=1)))
    status = end_of(job)
    assert [a.error for a in status.attempts] == ["first", ""]
    assert status.reason == "rank 0 exited with code 9; not restarted: all 1 restarts are used up"


def test_all_ranks_of_torchrun_start_again_after_one_was_killed(tmp_path: Path) -> None:
    code = """
import os, signal, time
rank, attempt = os.environ['RANK'], os.environ['TORCHFERRY_ATTEMPT']
print('rank', rank, 'attempt', attempt)
open('up' + rank + attempt, 'w')
while not all(os.path.exists('up' + r + attempt) for r in '01'):
    time.sleep(0.01)
if attempt == '1':
    os.kill(os.getpid(), signal.SIGKILL) if rank == '1' else time.sleep(1000)
"""
    job = begin(tmp_path, make_plan(**torchrun(code), **policy(max_restarts=1)))
    status = end_of(job)
    first = status.attempts[0]
    assert (status.state, first.first_failing_rank, first.signal) == ("succeeded", 1, 9)
    assert [rank_log(job, 2, rank) for rank in (0, 1)] == ["rank 0 attempt 2\n", "rank 1 attempt 2\n"]


def test_supervisor_killed_between_two_attempts_leaves_the_last_ones_verdict(tmp_path: Path) -> None:
    plan = make_plan(python("import os, sys; print(os.urandom(8)); sys.exit(6)"), **policy(max_restarts=5))
    job = begin(tmp_path, plan)
    wait_for(lambda: judge(job).attempt == 3 and judge(job).state == "preparing")
    os.kill(supervisor_pid(job), signal.SIGKILL)
    status = end_of(job)
    assert (status.state, status.code) == ("failed", 6)
    assert status.reason == "rank 0 exited with code 6; its supervisor was killed before attempt 3 was seen to run"


def kill_supervisor_and_adopt(job: Job) -> None:
    kill_supervisor(job)
    adopt(job)


FAILS_ON_GO = """
import os, sys, time
print('attempt', os.environ['TORCHFERRY_ATTEMPT'], os.environ.get('PATH') is not None)
while not os.path.exists('go'): time.sleep(0.02)
sys.exit(7 if os.environ['TORCHFERRY_ATTEMPT'] == '1' else 0)
"""


@pytest.mark.parametrize(
    ("secret_names", "state_", "attempt"), [([], "succeeded", 2), (["TOKEN"], "failed", 1)], ids=["plain", "secret"]
)
def test_adopted_job_starts_again_unless_its_secrets_are_gone(
    tmp_path: Path, secret_names: list[str], state_: str, attempt: int
) -> None:
    plan = make_plan(python(FAILS_ON_GO), secret_names=secret_names, **policy(max_restarts=1))
    job = begin(tmp_path, plan)
    said(job, "attempt 1")
    wait_for(lambda: judge(job).state == "running")
    kill_supervisor_and_adopt(job)
    (Path(job.code) / "go").touch()
    status = end_of(job)
    assert (status.state, status.attempt) == (state_, attempt)
    if secret_names:
        assert "the supervisor that knew its secrets was killed" in status.reason
    else:
        assert rank_log(job, 2) == "attempt 2 True\n"


# --- limits of time --------------------------------------------------------------------------------------------------


def test_runtime_limit_stops_the_job_in_order_and_over_all_attempts(tmp_path: Path) -> None:
    code = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print('saved'), sys.exit(0)))
print('up')
time.sleep(0.2)
sys.exit(1) if os.environ['TORCHFERRY_ATTEMPT'] == '1' else time.sleep(1000)
"""
    job = begin(tmp_path, make_plan(python(code), **policy(max_restarts=3, max_runtime_s=patient(6))))
    status = end_of(job)
    assert (status.state, status.code, status.attempt) == ("stopped", 0, 2)
    assert status.reason == f"stopped after --max-runtime {patient(6)}s"
    assert rank_log(job, 2) == "up\nsaved\n"


def test_runtime_limit_outlives_the_supervisor_that_was_killed(tmp_path: Path) -> None:
    plan = make_plan(python("import time; print('up'); time.sleep(1000)"), **policy(max_runtime_s=patient(3)))
    job = begin(tmp_path, plan)
    said(job, "up")
    wait_for(lambda: judge(job).state == "running")
    kill_supervisor_and_adopt(job)
    assert end_of(job).reason == f"stopped after --max-runtime {patient(3)}s"


def test_status_tells_how_long_a_running_job_has_been_silent(ferry: Ferry) -> None:
    started = ferry.run("run", *ferry.where(), "--detach", "--json", "--", "sh", "-c", "echo up; exec sleep 1000")
    job_id, log = json.loads(started.stdout)["id"], ferry.job() / "logs" / "attempt_1" / "rank_0.log"
    wait_for(lambda: log.exists() and log.read_text() == "up\n")
    then = log.stat().st_mtime - 600
    os.utime(log, (then, then))
    assert b"no log for 10m" in ferry.run("status", job_id).stdout
    assert ferry.run("stop", job_id, "--grace", "0").returncode == 0


def test_stalled_program_ends_with_a_code_of_its_own_and_what_its_ranks_said_last(tmp_path: Path) -> None:
    plan = make_plan(
        python("import time; print('one'); print('two'); time.sleep(1000)"), **policy(stall_timeout_s=patient(3))
    )
    status = end_of(begin(tmp_path, plan))
    assert (status.state, status.code, status.reason) == ("failed", 124, f"no output for {patient(3)}s")
    assert [(r.rank, r.running, r.last_line) for r in status.stalled] == [(0, True, "two")]


def test_program_that_goes_on_speaking_does_not_stall(tmp_path: Path) -> None:
    code = "import time\nfor n in range(9):\n    print(n)\n    time.sleep(0.5)"
    assert end_of(begin(tmp_path, make_plan(python(code), **policy(stall_timeout_s=patient(3))))).state == "succeeded"


STALLS_AT_FIRST = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
run = os.environ['TORCHFERRY_RUN_DIR']
attempt = os.environ['TORCHFERRY_ATTEMPT']
for step in range(1, 4):
    with open(run + '/metrics.jsonl', 'a') as f:
        f.write('{"step": %d}' % step + chr(10))
    time.sleep(0.1)
while attempt == '1':
    print('words are no steps')
    time.sleep(0.1)
"""


def test_stalled_trainer_is_killed_and_starts_again(tmp_path: Path) -> None:
    plan = make_plan(python(STALLS_AT_FIRST), kind="trainer", **policy(stall_timeout_s=patient(2), max_restarts=1))
    job = begin(tmp_path, plan)
    status = end_of(job)
    assert (status.state, status.attempt) == ("succeeded", 2)
    first = status.attempts[0]
    assert (first.code, first.reason, first.step) == (124, f"no step for {patient(2)}s (last step 3)", 3)


def test_rank_that_hangs_after_another_has_left_is_found_and_named(tmp_path: Path) -> None:
    code = "import os, time\nprint('rank', os.environ['RANK'])\nif os.environ['RANK'] == '1': time.sleep(1000)"
    status = end_of(begin(tmp_path, make_plan(**torchrun(code), **policy(stall_timeout_s=patient(2)))))
    assert (status.state, status.code) == ("failed", 124)
    assert [(r.running, r.last_line) for r in status.stalled] == [(False, "rank 0"), (True, "rank 1")]


# --- out of memory ---------------------------------------------------------------------------------------------------

MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")
STARTS_IN_GROUP = """
import os, sys
from deployer.agent.supervisor.start import LaunchInput, spawn
from deployer.agent.host.layout import Job
from deployer.agent.job.record import read_plan
open(sys.argv[2] + '/cgroup.procs', 'w').write('0')
job = Job(sys.argv[1])
spawn(job, LaunchInput(read_plan(job), 1, base_env=dict(os.environ)))
"""


@pytest.mark.skipif(not os.access(MEMORY_GROUPS, os.W_OK), reason="needs root and cgroup v1 memory groups")
def test_rank_that_the_kernel_kills_for_memory_is_told_from_another_kill(tmp_path: Path) -> None:
    group = MEMORY_GROUPS / f"torchferry-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(150 << 20))
        job = make_job(tmp_path, "attempts", make_plan(python("x = bytearray(400 << 20); print(len(x))")))
        argv = [sys.executable, "-c", STARTS_IN_GROUP, job.path, str(group)]
        subprocess.run(argv, check=True, cwd=REPO)
        status = end_of(job)
        assert (status.code, status.reason) == (
            137,
            "rank 0 was killed by SIGKILL; the kernel ended it: out of memory",
        )
        assert "memory limit" in status.hint
    finally:
        wait_for(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()


# --- full disks ------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_root(tmp_path: Path) -> Iterator[Path]:
    """A remote root on a file system of 4 MB."""
    root = tmp_path / "small"
    root.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", root], check=False).returncode:
        pytest.skip("mounting a small disk needs root")
    yield root
    subprocess.run(["umount", "-l", root], check=True)


def fill(root: Path) -> None:
    with (root / "filler").open("ab", buffering=0) as f, contextlib.suppress(OSError):
        while True:
            f.write(bytes(4096))


@pytest.mark.parametrize("seed", range(4))
def test_job_whose_disk_fills_at_some_moment_ends_with_its_own_code(small_root: Path, seed: int) -> None:
    code = "import sys, time; print('up'); time.sleep(0.3); sys.exit(7)"
    job = begin(small_root, make_plan(python(code), **policy()))
    threading.Event().wait(random.Random(seed).uniform(0, 0.5))
    fill(small_root)
    status = end_of(job)
    assert status.state == "failed"
    assert status.code == 7 or rank_log(job, 1) == ""  # a program that had not begun cannot: its log has no place


def test_restart_without_room_says_so_and_keeps_what_is_known_of_the_first_attempt(small_root: Path) -> None:
    code = "import os, sys\nif not os.path.exists('full'): sys.exit(5)\ntry:\n    f = open('filler', 'ab', 0)\n"
    code += "    while True: f.write(bytes(4096))\nexcept OSError: sys.exit(5)"
    job = make_job(small_root, "attempts", make_plan([]))
    (Path(job.code) / "full").touch()
    status = end_of(start(job, make_plan(python(code), **policy(max_restarts=2))))
    assert (status.state, status.attempts[0].code) == ("failed", 5)
    assert "No space left on device" in status.reason or status.code == 5


@pytest.mark.parametrize("limits", [{}, {"max_runtime_s": 1}], ids=["by request", "by the limit"])
def test_job_on_a_full_disk_can_be_stopped(small_root: Path, limits: dict[str, Any]) -> None:
    job = begin(small_root, make_plan(python("import time; print('up'); time.sleep(1000)"), **policy(**limits)))
    said(job, "up")
    wait_for(lambda: judge(job).state == "running")
    fill(small_root)
    if not limits:
        request_stop(job, 5)
    status = end_of(job)
    assert (status.state, status.code) == ("stopped", 143)
    assert read_status(job) == status  # it was written, not only found out


# --- by the keys of a config -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "code", "words"),
    [
        (
            "max_restarts: 1",
            7,
            "attempt 2 of at most 2, after attempt 1 ended: rank 0 exited with code 7; starts again",
        ),
        ("max_runtime_s: 1", 143, "was stopped after --max-runtime 1s"),
        ("stall_timeout_s: 3", 124, "failed: no output for 3s"),
    ],
)
def test_config_key_has_its_effect_on_the_host(ferry: Ferry, key: str, code: int, words: str) -> None:
    ends = "sys.exit(7)" if code == 7 else "time.sleep(1000)"
    (ferry.project / "own.py").write_text(f"import os, sys, time; print('pid', os.getpid()); {ends}")
    (ferry.project / "own.yaml").write_text(f"script: own.py\ntorchrun: false\ntarget:\n  device: cpu\n  {key}\n")
    done = ferry.run("own.yaml", *ferry.where(), "--no-pull")
    assert done.returncode == code
    assert words in done.stderr.decode()
    if code == 124:
        assert "rank 0 still ran; its last line: pid" in done.stderr.decode()
