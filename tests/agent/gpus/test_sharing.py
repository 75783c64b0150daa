"""A host with GPUs that several jobs want: refused, queued, chosen, never two on one. nvidia-smi is a script."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from deployer.agent.host.layout import Job
from tests.support.ferry import Ferry
from tests.support.jobs import end_of, wait_for
from tests.support.limits import FOREVER_S, HANG_S
from tests.support.smi import fake_smi

FOUR = "".join(f"{n}, GPU-{n}, Fake H100, 81559, {used}\n" for n, used in enumerate((300, 4, 200, 4)))
BLOCKED = "while [ ! -e go ]; do sleep 0.02; done"
"""A job that waits for the file `go` in its code folder."""


@pytest.fixture
def host(ferry: Ferry, tmp_path: Path) -> Iterator[Ferry]:
    """A client whose host has four GPUs; its jobs are ended."""
    ferry.env.update(fake_smi(tmp_path, gpus=FOUR))
    yield ferry
    for job_id in ferry.job_ids():
        status = status_of(ferry, job_id)
        if "supervisor" in status and status.get("ended_at") is None:
            ferry.run("stop", job_id, *ferry.where(), "--grace", "0")


def run(ferry: Ferry, *words: str, program: tuple[str, ...] = ("true",)) -> subprocess.CompletedProcess[bytes]:
    return ferry.run("run", *ferry.where(), "--python", sys.executable, *words, "--", *program)


def begin(ferry: Ferry, name: str, *words: str, script: str = BLOCKED) -> Path:
    """The folder of a job that was started, or queued, and left alone."""
    done = run(ferry, "--name", name, "--detach", *words, program=("sh", "-c", script))
    assert done.returncode == 0, done.stderr.decode()
    (job_id,) = (job for job in ferry.job_ids() if job.startswith(name + "-"))
    return ferry.job(job_id)


def status_of(ferry: Ferry, job: Path | str) -> dict[str, Any]:
    path = (ferry.job(job) if isinstance(job, str) else job) / "status.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


def go(job: Path) -> None:
    (job / "code" / "go").touch()


def reached(ferry: Ferry, job: Path, state: str) -> dict[str, Any]:
    found: dict[str, Any] = wait_for(lambda: status_of(ferry, job).get("state") == state and status_of(ferry, job))
    return found


def error_of(done: subprocess.CompletedProcess[bytes]) -> str:
    return done.stderr.decode().partition("Error: ")[2]


# --- refused ----------------------------------------------------------------------------------------------------------


def test_gpu_that_another_process_uses_is_refused_by_name_before_anything_is_kept(host: Ferry, tmp_path: Path) -> None:
    fake_smi(tmp_path, gpus=FOUR, apps=f"GPU-0, {os.getpid()}, 70300\n")
    (host.project / "a.py").write_text("print(1)")
    done = run(host, "--gpus", "0")
    assert done.returncode == 125
    assert error_of(done).startswith(f"GPU 0 is busy: pid {os.getpid()} of ")
    assert ", 70300 MiB\nhint: these are free: --gpus 1,2,3. Or add --queue to wait" in error_of(done)
    assert not list((host.root / "store" / "blobs").rglob("*")) and not host.job_ids()
    assert run(host, "--gpus", "0", "--allow-busy").returncode == 0


def test_gpu_that_another_job_holds_is_refused_with_job_and_user_until_it_ends(host: Ferry) -> None:
    holder = begin(host, "holder", "--gpus", "0,1")
    done = run(host, "--gpus", "1,2")
    assert done.returncode == 125
    assert error_of(done).startswith(f"GPU 1 is held by job {holder.name} of user ")
    assert "free: --gpus 2,3. Or" in error_of(done)
    go(holder)
    end_of(Job(str(holder)))
    assert run(host, "--gpus", "1,2").returncode == 0


def test_gpus_stay_held_while_one_rank_lives_though_the_supervisor_was_killed(host: Ferry) -> None:
    holder = begin(host, "holder", "--gpus", "0")
    supervisor = reached(host, holder, "running")["supervisor"]["pid"]
    os.kill(supervisor, signal.SIGKILL)
    assert "GPU 0 is held by job" in error_of(run(host, "--gpus", "0"))
    go(holder)
    wait_for(lambda: run(host, "--gpus", "0").returncode == 0)


def test_adopted_job_keeps_its_gpus_to_its_end(host: Ferry) -> None:
    holder = begin(host, "holder", "--gpus", "0", script="trap '' TERM; touch ready; " + BLOCKED)
    wait_for((holder / "code" / "ready").exists)
    os.kill(reached(host, holder, "running")["supervisor"]["pid"], signal.SIGKILL)
    with host.start("stop", holder.name, *host.where(), "--grace", "60") as stop:
        wait_for(lambda: status_of(host, holder).get("phase"))
        assert "GPU 0 is held by job" in error_of(run(host, "--gpus", "0"))
        go(holder)
        stop.communicate()
    assert run(host, "--gpus", "0").returncode == 0


def test_adopted_job_does_not_start_again_on_gpus_that_another_job_has_by_now(host: Ferry) -> None:
    script = "sleep 600 </dev/null >/dev/null 2>&1 & " + BLOCKED + "; exit 3"  # what it leaves behind holds no GPU
    first = begin(host, "first", "--gpus", "0", "--max-restarts", "1", script=script)
    os.kill(reached(host, first, "running")["supervisor"]["pid"], signal.SIGKILL)
    go(first)
    words = ("--gpus", "0", "--name", "second", "--detach")
    wait_for(lambda: run(host, *words, program=("sh", "-c", BLOCKED)).returncode == 0)
    (second,) = (job for job in host.job_ids() if job.startswith("second-"))
    assert host.run("logs", first.name, *host.where()).returncode == 3
    found = status_of(host, first)
    assert (found["state"], found["attempt"]) == ("failed", 1)
    assert found["reason"].endswith(
        f"; not restarted: its supervisor was killed, and {second} has its GPUs by now; resume it"
    )
    assert "GPU 0 is held by job " + second in error_of(run(host, "--gpus", "0"))


def test_restarted_job_keeps_its_gpus_between_its_attempts(host: Ferry) -> None:
    script = "[ $TORCHFERRY_ATTEMPT = 1 ] && exit 1; " + BLOCKED
    holder = begin(host, "holder", "--gpus", "0", "--max-restarts", "1", script=script)
    file = wait_for(lambda: list((host.root.parent / "leases").iterdir()))
    wait_for(lambda: status_of(host, holder).get("attempt") == 2)
    assert "GPU 0 is held by job" in error_of(run(host, "--gpus", "0"))
    reached(host, holder, "running")
    assert list((host.root.parent / "leases").iterdir()) == file
    go(holder)
    assert end_of(Job(str(holder))).state == "succeeded"


def test_resumed_job_asks_for_its_gpus_again(host: Ferry) -> None:
    failed = begin(host, "failed", "--gpus", "0", script="[ $TORCHFERRY_ATTEMPT = 2 ]")
    end_of(Job(str(failed)))
    holder = begin(host, "holder", "--gpus", "0")
    refused = host.run("resume", failed.name, *host.where())
    assert (refused.returncode, error_of(refused)[:27]) == (125, "GPU 0 is held by job holder")
    go(holder)
    end_of(Job(str(holder)))
    assert host.run("resume", failed.name, *host.where(), "--no-pull").returncode == 0


def test_slice_of_a_gpu_and_the_gpu_exclude_each_other(host: Ferry, tmp_path: Path) -> None:
    fake_smi(tmp_path, gpus="1, GPU-aabb2222-0000, Fake H100, 81559, 4\n")
    holder = begin(host, "holder", "--gpus", "MIG-1234-5678")
    assert error_of(run(host, "--gpus", "1")).startswith(f"GPU 1 is held by job {holder.name}")
    go(holder)
    end_of(Job(str(holder)))
    whole = begin(host, "whole", "--gpus", "1")
    assert error_of(run(host, "--gpus", "MIG-1234-5678")).startswith(f"GPU MIG-1234-5678 is held by job {whole.name}")


def test_gpus_shows_who_holds_uses_and_waits(host: Ferry, tmp_path: Path) -> None:
    fake_smi(tmp_path, gpus=FOUR, apps=f"GPU-3, {os.getpid()}, 500\n")
    holder = begin(host, "holder", "--gpus", "0")
    waiting = begin(host, "waiting", "--gpus", "0,1", "--queue")
    shown = host.run("gpus", *host.where()).stdout.decode().splitlines()
    assert shown[1].split()[:8] == ["0", "Fake", "H100", "300", "of", "81,559", "MiB", holder.name]
    assert f"pid {os.getpid()} of " in shown[4] and ", 500 MiB: " in shown[4]
    assert shown[-1].split()[0] == waiting.name and "0,1" in shown[-1].split()


def test_job_beside_others_is_listed_and_keeps_nobody_out(host: Ferry) -> None:
    beside = begin(host, "beside", "--gpus", "2", "--allow-busy")
    shown = json.loads(host.run("gpus", *host.where(), "--json").stdout)
    (held,) = shown["gpus"][2]["held"]
    assert (held["job"], held["shared"]) == (beside.name, True)
    assert run(host, "--gpus", "2").returncode == 0


def test_claims_whose_files_were_removed_are_made_again(host: Ferry) -> None:
    holder = begin(host, "holder", "--gpus", "0")
    first = begin(host, "first", "--gpus", "0", "--queue")
    reached(host, first, "queued")
    shutil.rmtree(host.root.parent / "leases")
    wait_for(lambda: len(list((host.root.parent / "leases").glob("job-*"))) == 2)
    assert "GPU 0 is held by job" in error_of(run(host, "--gpus", "0"))
    go(holder)
    reached(host, first, "running")
    go(first)
    assert end_of(Job(str(first))).state == "succeeded"


# --- chosen -----------------------------------------------------------------------------------------------------------


def test_auto_takes_the_freest_that_nobody_holds_and_notes_them(host: Ferry) -> None:
    begin(host, "holder", "--gpus", "1")
    done = run(host, "--gpus", "auto:2", "--name", "auto", program=("sh", "-c", "echo $CUDA_VISIBLE_DEVICES"))
    assert done.stdout == b"2,3\n"
    (auto,) = (job for job in host.job_ids() if job.startswith("auto-"))
    assert status_of(host, auto)["slots"]["gpus"] == "2,3"
    rows = json.loads(host.run("ps", *host.where(), "--all", "--json").stdout)
    assert next(row["gpus"] for row in rows if row["id"] == auto) == ["2", "3"]
    assert "fewer GPUs are free than auto:4 asks for; GPU 1 is held" in error_of(run(host, "--gpus", "auto:4"))


def test_auto_beside_others_takes_busy_gpus_last(host: Ferry) -> None:
    begin(host, "holder", "--gpus", "1,3")
    words = ("--gpus", "auto:3", "--allow-busy")
    done = run(host, *words, program=("sh", "-c", "echo $CUDA_VISIBLE_DEVICES"))
    assert done.stdout == b"0,1,2\n"


# --- queued -----------------------------------------------------------------------------------------------------------


def test_queued_jobs_start_in_order_and_show_their_place(host: Ferry) -> None:
    holder = begin(host, "holder", "--gpus", "0")
    first = begin(host, "first", "--gpus", "0", "--queue")
    with host.start("run", *host.where(), "--gpus", "0", "--queue", "--name", "second", "--", "echo", "ran") as second:
        wait_for(lambda: len(host.job_ids()) == 3 and status_of(host, host.job_ids()[2]).get("queue"))
        assert "before it in the queue for GPU 0: job first" in error_of(run(host, "--gpus", "0"))
        assert f"position 1; GPU 0 is held by job {holder.name}" in host.run("status", first.name).stdout.decode()
        assert status_of(host, host.job_ids()[2])["queue"]["position"] == 2
        go(holder)
        reached(host, first, "running")
        wait_for(lambda: status_of(host, host.job_ids()[2])["queue"]["position"] == 1)
        go(first)
        out, err = second.communicate(timeout=HANG_S)
    assert (out, second.returncode) == (b"ran\n", 0)
    said = err.decode()
    assert f"queued: position 2; GPU 0 is held by job {holder.name} of user " in said
    assert f"before you: {first.name} of " in said
    assert f"queued: position 1; GPU 0 is held by job {first.name} of user " in said


def test_launch_that_does_not_queue_overtakes_nobody_who_waits_for_the_same_gpu(host: Ferry) -> None:
    begin(host, "holder", "--gpus", "0")
    first = begin(host, "first", "--gpus", "0,1", "--queue")
    assert status_of(host, first)["state"] == "queued"
    done = run(host, "--gpus", "1")  # it is free, and waited for
    assert error_of(done).startswith(f"before it in the queue for GPU 1: job {first.name} of user ")
    assert run(host, "--gpus", "2").returncode == 0


def test_stop_ends_a_queued_job_at_once_and_its_place_is_gone(host: Ferry) -> None:
    begin(host, "holder", "--gpus", "0")
    first = begin(host, "first", "--gpus", "0,1", "--queue")
    assert host.run("stop", first.name, *host.where(), "--grace", str(FOREVER_S)).returncode == 0
    final = status_of(host, first)
    assert (final["state"], final["reason"]) == ("stopped", "stopped on request, while it was queued")
    assert run(host, "--gpus", "1").returncode == 0


def test_queued_job_whose_supervisor_is_killed_is_lost_and_its_place_is_gone(host: Ferry) -> None:
    begin(host, "holder", "--gpus", "0")
    first = begin(host, "first", "--gpus", "0,1", "--queue")
    os.kill(reached(host, first, "queued")["supervisor"]["pid"], signal.SIGKILL)
    final = end_of(Job(str(first)))
    assert (final.state, final.reason) == ("lost", "it waited for its GPUs, and its supervisor is gone")
    assert b"position" not in host.run("status", first.name, *host.where()).stdout
    assert run(host, "--gpus", "1").returncode == 0


def test_queue_waits_through_a_driver_that_hangs_and_says_so(host: Ferry, tmp_path: Path) -> None:
    holder = begin(host, "holder", "--gpus", "0")
    first = begin(host, "first", "--gpus", "0", "--queue", script="true")
    reached(host, first, "queued")
    fake_smi(tmp_path, gpus=FOUR, then="echo No devices were found; exit 6")
    go(holder)
    trouble = wait_for(lambda: (status_of(host, first).get("queue") or {}).get("trouble"))
    assert trouble == "nvidia-smi ended with 6: No devices were found"  # of its question for processes
    fake_smi(tmp_path, gpus=FOUR)
    assert end_of(Job(str(first))).state == "succeeded"


# --- many at once -----------------------------------------------------------------------------------------------------

SPAN = """
import os, time
began = time.monotonic_ns()
time.sleep(0.05)
print(os.environ["CUDA_VISIBLE_DEVICES"], began, time.monotonic_ns())
"""


def test_launches_of_one_gpu_at_the_same_moment_run_one_after_another(host: Ferry) -> None:
    words = ("run", *host.where(), "--python", sys.executable, "--gpus", "1", "--queue", "--no-pull", "--name")
    together = [host.start(*words, f"j{n}", "--", "python", "-c", SPAN) for n in range(6)]
    outputs = [process.communicate(timeout=HANG_S) for process in together]
    assert [process.returncode for process in together] == [0] * 6, outputs
    spans = sorted([int(word) for word in out.split()[1:]] for out, _ in outputs)
    assert all(earlier[1] < later[0] for earlier, later in pairwise(spans))


def test_of_launches_at_the_same_moment_without_a_queue_one_wins_each_gpu(host: Ferry) -> None:
    words = ("run", *host.where(), "--python", sys.executable, "--gpus", "auto:2", "--detach", "--name")
    together = [host.start(*words, f"j{n}", "--", "sh", "-c", BLOCKED) for n in range(6)]
    outputs = [process.communicate(timeout=HANG_S) for process in together]
    assert sorted(process.returncode for process in together) == [0, 0, 125, 125, 125, 125], outputs
    chosen = [reached(host, host.job(job_id), "running")["slots"]["gpus"] for job_id in host.job_ids()]
    assert sorted(chosen) == ["0,2", "1,3"]


def test_launches_of_different_trees_at_the_same_moment_each_run_their_own(ferry: Ferry, tmp_path: Path) -> None:
    clients = []
    for n in range(6):
        project = tmp_path / f"project{n}"
        project.mkdir()
        (project / "a.py").write_text(f"import b\nprint('tree {n}', b.VALUE)")
        (project / "b.py").write_text(f"VALUE = {n}")
        clients.append(Ferry(project, tmp_path / f"state{n}", ferry.root))
    words = ("run", *ferry.where(), "--python", sys.executable, "--no-pull", "--name", "same", "--", "python", "a.py")
    together = [client.start(*words) for client in clients]
    outputs = [process.communicate(timeout=HANG_S)[0] for process in together]
    assert outputs == [f"tree {n} {n}\n".encode() for n in range(6)]


def test_torchrun_jobs_at_the_same_moment_all_start_though_its_usual_port_is_taken(ferry: Ferry) -> None:
    (ferry.project / "a.py").write_text("import os; print(os.environ['MASTER_PORT'])")
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind(("127.0.0.1", 29500))
            taken.listen()
        except OSError:
            pass  # somebody else has it: all the same
        words = ("--device", "cpu", "--gpus", "0,1", "--torchrun", "--no-pull", "--", "a.py")
        together = [ferry.start("run", *ferry.where(), "--python", sys.executable, *words) for _ in range(4)]
        outputs = [process.communicate(timeout=HANG_S) for process in together]
    assert [process.returncode for process in together] == [0] * 4, outputs


def test_gpus_of_a_host_without_any_says_so_and_names_the_way_out(ferry: Ferry) -> None:
    ferry.env["PATH"] = os.path.dirname(sys.executable)  # noqa: PTH120
    done = ferry.run("gpus", *ferry.where())
    assert done.returncode == 125
    message, hint = done.stderr.decode().splitlines()
    assert message.endswith(" has no nvidia-smi, so no GPU is seen")
    assert hint.endswith("run on its CPUs with --device cpu, or choose another machine")
