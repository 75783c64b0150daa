"""Jobs whose folder, root or agent was deleted or moved while they ran: listed, stopped, and forgotten."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from deployer.agent.gpus.leases import read_claims
from deployer.agent.host.layout import Job
from deployer.agent.host.processes import is_running, process_of
from tests.support.ferry import Ferry
from tests.support.jobs import said, wait_for
from tests.support.smi import fake_smi
from tests.support.stubborn import canary, program, running

PARTS = "worker", "daemon", "daemon without its environment"
GIVEN_TIME = ("--grace", "3600")


def begin(ferry: Ferry, name: str, word: str, code: str = "", *options: str) -> Job:
    """A job of the command line that has said `up`, with all its processes."""
    ferry.write("it.py", code or program(*PARTS))
    words = ("run", *ferry.where(), "--detach", "--name", name, "--python", sys.executable, *options)
    done = ferry.run(*words, "--", "python", "it.py", word)
    assert done.returncode == 0, done.stderr.decode()
    (job_id,) = [i for i in ferry.job_ids() if i.startswith(name)]
    job = Job(str(ferry.job(job_id)))
    said(job, "up")
    wait_for(lambda: code or len(running(word)) == 2 + len(PARTS))
    return job


def states(ferry: Ferry, *words: str) -> dict[str, str]:
    done = ferry.run("ps", *words, "--json")
    assert done.returncode == 0, done.stderr.decode()
    return {row["id"]: row["state"] for row in json.loads(done.stdout)}


def remove(path: Path) -> None:
    """The supervisor may be writing into it meanwhile."""
    while path.exists():
        shutil.rmtree(path, ignore_errors=True)


def the_job(ferry: Ferry, job: Job) -> None:
    remove(Path(job.path))


def the_job_and_its_supervisor(ferry: Ferry, job: Job) -> None:
    supervisor = process_of(json.loads(Path(job.status).read_text())["supervisor"]["pid"])
    os.kill(supervisor.pid, signal.SIGKILL)
    wait_for(lambda: not is_running(supervisor))
    shutil.rmtree(job.path)


def the_root(ferry: Ferry, job: Job) -> None:
    remove(ferry.root)


@pytest.mark.parametrize("lose", [the_job, the_job_and_its_supervisor, the_root])
@pytest.mark.parametrize("how", [GIVEN_TIME, ("--force",)], ids=["in time", "forced"])
def test_job_that_has_lost_its_files_is_listed_stopped_and_forgotten(
    ferry: Ferry, lose: Callable[[Ferry, Job], None], how: tuple[str, ...]
) -> None:
    word, other_word = canary(), canary()
    job, other = begin(ferry, "lost", word), begin(ferry, "other", other_word)
    lose(ferry, job)
    assert states(ferry)[job.id] == states(ferry)[other.id] == "running"
    shown = ferry.run("ps").stdout.decode()
    assert re.search(rf"{job.id} +running \((unsupervised, )?its folder is gone\)", shown)
    assert b"its folder is gone; " in ferry.run("status", job.id).stdout
    resumed = ferry.run("resume", job.id, "--detach")
    assert resumed.returncode == 2 and b" is still running (attempt 1)" in resumed.stderr, resumed.stderr.decode()
    for words in (("logs", job.id), ("pull", job.id), ("exec", job.id, "--", "ls")):
        told = ferry.run(*words)
        assert (told.returncode, told.stdout) == (125, b""), (words, told.stderr.decode())
        assert f"the folder of {job.id} is gone, with its logs and results".encode() in told.stderr
    done = ferry.run("stop", job.id, *how)
    stopped = done.stderr.decode()
    assert (running(word), done.returncode) == ([], 0), stopped
    assert f"{job.id} stopped; " in stopped and "its folder is gone, and it is forgotten here" in stopped
    assert not Path(job.path).exists() and job.id not in states(ferry)
    assert b"no job" in ferry.run("stop", job.id).stderr
    assert len(running(other_word)) == 2 + len(PARTS)
    assert ferry.run("stop", "--all", "--yes", "--force").returncode == 0
    assert running(other_word) == []


def test_job_that_ended_with_its_folder_is_forgotten_when_it_is_stopped(ferry: Ferry) -> None:
    word = canary()
    job = begin(ferry, "ended", word)
    the_job(ferry, job)
    for pid in running(word):
        os.kill(pid, signal.SIGKILL)
    done = ferry.run("stop", job.id)
    wait_for(lambda: not running(word))
    said_ = done.stderr.decode()
    assert done.returncode == 0 and "it is forgotten here" in said_, said_
    assert not (ferry.state / "jobs" / f"{job.id}.json").exists()


def test_stop_leaves_the_folder_of_a_job_that_was_launched_again_meanwhile(ferry: Ferry) -> None:
    word = canary()
    job = begin(ferry, "again", word, program("deaf"))
    record = Path(job.record).read_text()
    the_job(ferry, job)
    with ferry.start("stop", job.id, "--grace", "2") as stop:
        wait_for(Path(job.stop).exists)
        Path(job.record).write_text(record)  # as a launch does that is repeated
        stop.communicate()
    assert (stop.returncode, running(word)) == (0, [])
    assert Path(job.record).read_text() == record


def test_supervisor_without_its_files_stops_by_a_signal_and_saves(ferry: Ferry, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    code = "import signal, sys, time\ndef save(*_):\n    time.sleep(1); open(sys.argv[2], 'w'); sys.exit(0)\n"
    code += "signal.signal(15, save)\nprint('up')\nwhile True: time.sleep(1)"
    ferry.write("it.py", code)
    word = canary()
    words = ("run", *ferry.where(), "--detach", "--name", "saves", "--python", sys.executable)
    assert ferry.run(*words, "--", "python", "it.py", word, str(saved)).returncode == 0
    job = Job(str(ferry.job()))
    said(job, "up")
    supervisor = process_of(json.loads(Path(job.status).read_text())["supervisor"]["pid"])
    the_root(ferry, job)
    os.kill(supervisor.pid, signal.SIGTERM)
    wait_for(lambda: not running(word))
    assert saved.exists()
    wait_for(lambda: not is_running(supervisor))


def test_root_that_was_moved_away_has_its_jobs_there(ferry: Ferry) -> None:
    word = canary()
    job = begin(ferry, "moved", word)
    ferry.root = ferry.root.rename(ferry.root.parent / "elsewhere")
    assert states(ferry, *ferry.where()) == {job.id: "running"}
    done = ferry.run("stop", job.id, *ferry.where(), "--grace", "1")
    assert (running(word), done.returncode) == ([], 0), done.stderr.decode()
    assert f"{job.id} stopped; " in done.stderr.decode()


def test_all_that_is_left_of_a_job_holds_its_gpu_without_a_mark_and_goes(ferry: Ferry, tmp_path: Path) -> None:
    ferry.env.update(fake_smi(tmp_path, gpus="0, GPU-0, Fake H100, 81559, 4\n"))
    word = canary()
    hidden = "import os, sys, time\nif os.fork(): os._exit(0)\nos.setsid()\nwhile True: time.sleep(9)"
    code = "import subprocess, sys, time\nnull = subprocess.DEVNULL\nword = sys.argv[1]\n"
    code += (
        f"subprocess.Popen([sys.executable, '-c', {hidden!r}, word, 'hidden'], env={{}}, stdout=null, stderr=null)\n"
    )
    code += "print('up')\nwhile True: time.sleep(9)"
    job = begin(ferry, "holds", word, code, "--gpus", "0")
    left: int = wait_for(lambda: next((pid for pid in running(word) if _is_hidden(pid)), 0))
    supervisor = process_of(json.loads(Path(job.status).read_text())["supervisor"]["pid"])
    os.kill(supervisor.pid, signal.SIGKILL)
    for pid in running(word):
        if pid != left:
            os.kill(pid, signal.SIGKILL)
    wait_for(lambda: running(word) == [left] and not is_running(supervisor))
    shutil.rmtree(job.path)
    assert [claim.job for claim in read_claims()] == [job.id]
    done = ferry.run("stop", job.id)
    assert (running(word), done.returncode) == ([], 0), done.stderr.decode()
    assert read_claims() == []


def test_lease_whose_name_somebody_removes_is_shown_again_until_the_job_is_swept(ferry: Ferry, tmp_path: Path) -> None:
    ferry.env.update(fake_smi(tmp_path, gpus="0, GPU-0, Fake H100, 81559, 4\n"))
    word, leases = canary(), tmp_path / "leases"
    deaf = "import signal, time\nsignal.signal(15, signal.SIG_IGN)\nwhile True: time.sleep(9)"
    code = (
        "import os, subprocess, sys, time\nprint('up', flush=True)\nwhile not os.path.exists('go'): time.sleep(0.1)\n"
    )
    code += f"subprocess.Popen([sys.executable, '-c', {deaf!r}, sys.argv[1], 'left'])\ntime.sleep(1)"
    job = begin(ferry, "kept", word, code, "--gpus", "0")

    def names() -> list[Path]:
        return [*leases.glob("job-*")]

    def is_shown_again() -> None:
        for path in names():
            path.unlink()
        wait_for(names)
        assert [claim.job for claim in read_claims()] == [job.id]

    is_shown_again()
    Path(job.code, "go").touch()
    wait_for(lambda: len(running(word)) == 1)  # what it leaves, which hears no TERM
    is_shown_again()
    assert len(running(word)) == 1
    wait_for(lambda: states(ferry).get(job.id) == "succeeded")
    assert (running(word), names()) == ([], [])


def _is_hidden(pid: int) -> bool:
    with suppress(OSError):
        return b"hidden" in Path(f"/proc/{pid}/cmdline").read_bytes() and os.getsid(pid) == pid
    return False
