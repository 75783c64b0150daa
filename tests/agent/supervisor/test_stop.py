"""`stop` with real processes that do not want to end: nothing of the job remains, and nothing else is touched."""

from __future__ import annotations

import json
import os
import pty
import random
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from deployer.agent.gpus.freed import device_holders, still_held
from deployer.agent.gpus.nvidia import Gpu, Holder
from deployer.agent.gpus.view import GpuHolder
from deployer.agent.host.layout import Job
from deployer.agent.host.processes import Survivor
from deployer.agent.host.typed import to_json
from deployer.agent.job.judge import judge
from deployer.agent.job.status import RUNNING, STOPPED, Status
from deployer.agent.job.stop import request_stop
from deployer.agent.job.views import StopReport
from deployer.agent.requests.stop import _Ending
from deployer.commands.launch import stop as command
from deployer.errors import HostError
from tests.support import stubborn
from tests.support.ferry import REPO, Ferry
from tests.support.jobs import (
    UP,
    end_of,
    launch,
    log_of,
    make_job,
    make_plan,
    python,
    run_up,
    said,
    start,
    supervisor_pid,
    torchrun,
    wait_for,
)
from tests.support.limits import FOREVER_S, HANG_S, PATIENCE
from tests.support.lying import lying_host
from tests.support.smi import fake_smi
from tests.support.stubborn import canary, hops, program, running

# --- trees -----------------------------------------------------------------------------------------------------------


def test_tree_of_shell_torchrun_deaf_ranks_workers_and_daemons_is_gone_soon_after_the_grace(tmp_path: Path) -> None:
    word = canary()
    parts = "deaf", "worker", "deaf worker", "daemon", "daemon without its environment", "halted worker"
    changes = torchrun(program(*parts))
    argv = ["/bin/sh", "-c", '"$@"; exit $?', "sh", *changes["argv"], word]
    plan = make_plan(**{**changes, "argv": argv})
    job = start(make_job(tmp_path, "tree", plan), plan)
    said(job, "up", "rank_0.log"), said(job, "up", "rank_1.log")
    wait_for(lambda: len(running(word)) == 2 + 2 * (2 + 5))  # sh, torchrun; a wrapper, a rank and five others each
    began = time.monotonic()
    request_stop(job, 1)
    status = end_of(job)
    took_s = time.monotonic() - began
    assert (status.state, status.remaining, running(word)) == ("stopped", (), [])
    assert status.ended is not None and status.ended >= 16
    assert took_s < 25 * PATIENCE  # the grace and the bound are 3 s; torchrun itself would take 30
    assert [log_of(job, f"rank_{n}.log") for n in (0, 1)] == ["up\n", "up\n"]  # no rank was started again


@pytest.mark.parametrize("parts", [("hopper",), ("respawner",), ("deaf", "hopper", "respawner", "halted worker")])
def test_processes_that_start_each_other_anew_are_all_ended(tmp_path: Path, parts: tuple[str, ...]) -> None:
    word = canary()
    job = run_up(tmp_path, "again", program(*parts), word)
    wait_for(lambda: "hopper" not in parts or hops(Path(job.code)))
    wait_for(lambda: "respawner" not in parts or len(running(word)) > 3)
    request_stop(job, 0)
    assert (end_of(job).remaining, running(word), hops(Path(job.code))) == ((), [], False)


def test_halted_rank_goes_on_to_save(tmp_path: Path) -> None:
    code = """
import os, signal, sys, time
def save(*_):
    open('saved', 'w').write('all of it'); sys.exit(0)
signal.signal(signal.SIGTERM, save)
print('up')
os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(1000)
"""
    job = run_up(tmp_path, "halted", code)
    request_stop(job, FOREVER_S)
    assert end_of(job).state == "stopped"
    assert (Path(job.code) / "saved").read_text() == "all of it"


def test_forced_stop_gives_no_time_to_save(tmp_path: Path) -> None:
    code = "import signal, time\nsignal.signal(15, lambda *_: open('heard', 'w'))\nprint('up')\nwhile 1: time.sleep(9)"
    job = run_up(tmp_path, "forced", code)
    request_stop(job, FOREVER_S)
    wait_for(lambda: (Path(job.code) / "heard").exists())
    request_stop(job, FOREVER_S, force=True)
    assert end_of(job).state == "stopped"


def test_job_launched_by_a_job_is_not_its_own(tmp_path: Path) -> None:
    code = f"""
import json, os, sys, time
sys.path.insert(0, {str(REPO)!r})
from pathlib import Path
from tests.support.jobs import make_job, make_plan, python, said, start
plan = make_plan(python({UP!r}))
said(start(make_job(Path(sys.argv[1]), 'inner', plan), plan), 'up')
print('up'); time.sleep(1000)
"""
    outer = run_up(tmp_path, "outer", code, str(tmp_path))
    inner = Job(str(Path(outer.path).parent / "inner"))
    request_stop(outer, 0)
    assert end_of(outer).remaining == ()
    assert (judge(inner).state, judge(inner).unsupervised) == ("running", False)
    request_stop(inner, 0)
    assert end_of(inner).state == "stopped"


def test_job_of_the_same_id_under_another_root_is_left_alone(tmp_path: Path) -> None:
    one, two = (run_up(tmp_path / name, "same", UP) for name in ("a", "b"))
    request_stop(one, 0)
    assert (end_of(one).state, judge(two).state) == ("stopped", "running")
    request_stop(two, 0)
    assert end_of(two).code == 143


@pytest.mark.soak
def test_fifty_stubborn_trees_leave_no_process(tmp_path: Path) -> None:
    chance = random.Random(52)
    for number in range(50):
        word = canary()
        parts = chance.sample(sorted(stubborn.PARTS), chance.randint(1, len(stubborn.PARTS)))
        job = run_up(tmp_path, f"tree{number}", program(*parts), word)
        time.sleep(chance.uniform(0, 0.3))
        if chance.random() < 0.3:
            request_stop(job, force=True)
        else:
            request_stop(job, chance.choice([0, 0.2, 1]))
        status = end_of(job)
        assert (status.state, status.remaining, running(word)) == ("stopped", (), []), (number, parts)
        assert not hops(Path(job.code))


# --- GPUs ------------------------------------------------------------------------------------------------------------

GPU = Gpu(0, "GPU-0", "Fake H100", 81559, 4)


@pytest.mark.parametrize(
    ("used_mib", "using", "expected"),
    [
        (4, [], []),
        (600, [(7, "root", 590)], [GpuHolder(0, 7, "x", 590)]),  # 7 is the job's
        (600, [(8, "ann", 590)], []),  # the next one's job has the GPU already
        (70_000, [(8, "ann", 60_000)], [GpuHolder(0, None, "no process that is seen here", 10_000)]),
        (70_000, [(8, "ann", 0)], []),  # the driver does not tell how much of it is whose
        (600, [(9, "?", 590)], [GpuHolder(0, 9, "x", 590)]),
    ],
)
def test_gpu_is_held_by_the_jobs_own_and_by_what_nobody_explains(used_mib: int, using: Any, expected: Any) -> None:
    holders = [Holder("GPU-0", pid, user, "x", mib) for pid, user, mib in using]
    assert still_held([GPU._replace(memory_used_mib=used_mib)], holders, {7}) == expected


def test_unseen_process_beside_which_the_job_ran_does_not_count() -> None:
    holders = [Holder("GPU-0", 9, "?", "another container's", 590)]
    assert still_held([GPU], holders, {7}, allow_busy=True) == []


def test_process_that_only_inherited_the_device_is_found(tmp_path: Path) -> None:
    device = tmp_path / "nvidia3"
    with device.open("w") as f, subprocess.Popen(["sleep", "1000"], stdout=f) as child:
        held = device_holders(re.compile(re.escape(str(device))))
        child.kill()
    assert (3, child.pid, f"sleep 1000 holds {device}") in [(h.gpu, h.pid, h.command) for h in held]


def test_sweep_of_a_stop_leaves_what_somebody_has_started_again(tmp_path: Path) -> None:
    plan = make_plan(python(UP))
    job = start(make_job(tmp_path, "again", plan), plan)
    said(job, "up")
    assert _Ending(job, None, 0.0, force=False)._sweep() is None  # type: ignore[arg-type]
    assert judge(job).state == RUNNING
    request_stop(job, 0)
    assert end_of(job).state == STOPPED


def gpu_job(tmp_path: Path, smi: str, code: str = UP) -> Status:
    """The final status of a stopped job on GPU 0 whose pid is in the file `pid`; `smi` prints the compute processes."""
    env = {**os.environ, **fake_smi(tmp_path, gpus="0, GPU-0, Fake H100, 81559, 4\n")}
    script = tmp_path / "nvidia-smi"
    script.write_text(script.read_text().replace(f"cat {tmp_path}/apps", smi))
    code = f"import os; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n" + code
    plan = make_plan(python(code), device="cuda", gpus=["0"])
    job = start(make_job(tmp_path, "gpu", plan), plan, base_env=env)
    said(job, "up")
    request_stop(job, 0)
    return end_of(job)


def test_gpus_are_free_once_the_driver_lists_the_job_no_more(tmp_path: Path) -> None:
    look = f"for i in $(cat {tmp_path}/left); do echo GPU-0, $(cat {tmp_path}/pid), 500; done"
    (tmp_path / "left").write_text("1")
    once = f"{look}; kill -0 $(cat {tmp_path}/pid) 2>/dev/null || : > {tmp_path}/left"  # listed once after its end
    status = gpu_job(tmp_path, once)
    assert (status.gpus_free, status.gpu_holders, (tmp_path / "left").read_text()) == (True, (), "")


def test_gpu_that_still_lists_the_job_is_reported_with_the_pid(tmp_path: Path) -> None:
    status = gpu_job(tmp_path, f"echo GPU-0, $(cat {tmp_path}/pid), 500")
    pid = int((tmp_path / "pid").read_text())
    (holder,) = status.gpu_holders
    assert (status.gpus_free, holder.gpu, holder.pid, holder.memory_mib) == (False, 0, pid, 500)


# --- the command -----------------------------------------------------------------------------------------------------


def test_stop_of_several_names_what_was_ended_of_each(ferry: Ferry) -> None:
    one, two, other = (launch(ferry, name) for name in ("one", "two", "other"))
    done = ferry.run("stop", one, two, "--grace", "5", "--json")
    ends = {end["id"]: end for end in json.loads(done.stdout)}
    assert (done.returncode, set(ends)) == (0, {one, two})
    assert [(e["state"], e["was"], e["ended"], e["remaining"]) for e in ends.values()] == [
        ("stopped", "running", 2, [])
    ] * 2
    rows = {row["id"]: row["state"] for row in json.loads(ferry.run("ps", *ferry.where(), "--json").stdout)}
    assert rows == {one: "stopped", two: "stopped", other: "running"}
    asked = ferry.run("stop", "--all", *ferry.where())
    assert asked.returncode == 2 and b"--yes" in asked.stderr and other.encode() in asked.stderr
    assert ferry.run("stop", "--all", "--yes", "--force", *ferry.where()).returncode == 0
    again = ferry.run("stop", "--all", "--yes", *ferry.where())
    assert (again.returncode, b"no job to stop" in again.stderr) == (0, True)
    assert ferry.run("stop", "--all", "--json", *ferry.where()).stdout == b"[]\n"
    ended = ferry.run("stop", other)
    assert (ended.returncode, b"had ended already: stopped" in ended.stderr) == (0, True)


def test_stop_goes_on_without_its_client(ferry: Ferry) -> None:
    code = """
import signal, sys, time
def save(*_):
    print('saving'); time.sleep(2); open('saved', 'w').write('all of it'); sys.exit(0)
signal.signal(15, save); print('up')
while True: time.sleep(1)
"""
    job = Job(str(ferry.job(launch(ferry, "saves", code))))
    client = ferry.start("stop", job.id, "--grace", str(FOREVER_S))
    said(job, "saving")
    client.send_signal(signal.SIGKILL)
    client.communicate()
    assert end_of(job).state == "stopped"
    assert (Path(job.code) / "saved").read_text() == "all of it"


def test_stop_ends_what_a_job_left_that_was_killed_with_its_supervisor(ferry: Ferry) -> None:
    word = canary()
    code = f"HEAD = {stubborn.HEAD!r}\nsys_argv = __import__('sys').argv.append({word!r})\nexec(HEAD)\n"
    code += stubborn.PARTS["deaf worker"] + "print('up'); time.sleep(1000)"
    job = Job(str(ferry.job(launch(ferry, "left", code))))
    wait_for(lambda: running(word))
    rank = json.loads((Path(job.ranks(1)) / "rank_0.json").read_text())
    for pid in (supervisor_pid(job), rank["wrapper"]["pid"], rank["pid"]):
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: judge(job).unsupervised)  # nothing says that it has ended
    done = ferry.run("stop", job.id, "--grace", "0")
    assert (done.returncode, running(word)) == (0, []), done.stderr.decode()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("stop",), "stop needs the ID of a job, or --all"),
        (("stop", "a", "--all"), "stop needs the ID of a job, or --all"),
        (("stop", "a", "--ssh", "h", "--force", "--grace", "5"), "--force gives no time"),
        (("stop", "a", "--grace", "nan"), "nan is not a number of seconds"),
        (("stop", "a", "--connect-timeout", "inf"), "inf is not a number of seconds"),
    ],
)
def test_stop_that_is_not_clear_stops_nothing(ferry: Ferry, words: tuple[str, ...], says: str) -> None:
    done = ferry.run(*words)
    assert (done.returncode, says in done.stderr.decode()) == (2, True)


def test_handler_that_crashes_ends_its_rank_and_the_stop_is_true(tmp_path: Path) -> None:
    code = "import signal, time\nsignal.signal(15, lambda *_: 1 / 0)\nprint('up')\nwhile True: time.sleep(1)"
    job = run_up(tmp_path, "crashes", code)
    request_stop(job, FOREVER_S)
    status = end_of(job)
    assert (status.state, status.code, status.remaining) == ("stopped", 1, ())
    assert "ZeroDivisionError" in log_of(job)


def test_what_remains_is_named_with_pid_command_and_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    final = Status(
        STOPPED,
        ended=3,
        remaining=(Survivor(7, 1, "python train.py\x1b[2J", "D"), Survivor(8, 1, "sudo nvtop", "S", 0)),
        gpus_free=False,
        gpu_holders=(GpuHolder(0, 7, "python", 500),),
    )
    report = to_json(StopReport("j", final, RUNNING))
    code = f"event('status', {report!r}); frame({{'id': 0, 'ok': {{}}}}); sys.stdin.read()"
    assert command.stop([(lying_host(code, tmp_path), "j")], grace_s=1, force=False, as_json=False) == 1
    said = capsys.readouterr().err
    assert "still there: pid 7 python train.py\\x1b[2J (the kernel holds it in a call" in said
    assert "still there: pid 8 sudo nvtop (it became another user's, uid 0: that one or root can end it)" in said
    assert "GPU 0 is not free: pid 7 python, 500 MiB" in said
    assert "j stopped; 3 processes ended; 2 processes of it could not be ended" in said


def test_stop_of_all_asks_on_a_terminal_and_a_no_stops_nothing(ferry: Ferry) -> None:
    job_id = launch(ferry, "asked")
    terminal, inside = pty.openpty()
    words = ferry.argv("stop", "--all", *ferry.where())
    client = subprocess.Popen(words, env=ferry.environment(), stdin=inside, stdout=inside, stderr=inside)
    os.close(inside)
    seen = b""
    while b"[y/N]" not in seen:
        seen += os.read(terminal, 4096)
    os.write(terminal, b"n\n")
    while b"nothing was stopped" not in seen:
        seen += os.read(terminal, 4096)
    assert client.wait(HANG_S) == 1 and job_id.encode() in seen
    os.close(terminal)
    job = Job(str(ferry.job(job_id)))
    assert (judge(job).state, Path(job.stop).exists()) == ("running", False)
    request_stop(job, force=True)
    assert end_of(job).state == "stopped"


@pytest.mark.parametrize("status", [5, {"job_id": "j"}, {"job_id": "j", "was": "running", "status": {"state": 3}}])
def test_stop_of_a_host_that_answers_nonsense_is_one_error(tmp_path: Path, status: Any) -> None:
    code = f"event('state', 5); event('status', {status!r}); frame({{'id': 0, 'ok': {{}}}}); sys.stdin.read()"
    with pytest.raises(HostError, match="not understood"):
        command.stop([(lying_host(code, tmp_path), "j")], grace_s=1, force=False, as_json=False)
