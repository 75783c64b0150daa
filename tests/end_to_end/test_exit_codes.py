"""Every exit code that `--help` and docs/using.md name, by a command that ends with it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from deployer.exit_codes import EXIT_CODES, OWN, as_markdown
from tests.support.ferry import REPO, Ferry
from tests.support.jobs import wait_for
from tests.support.limits import HANG_S
from tests.support.smi import fake_smi
from tests.support.sshd import ALIAS, SshServer

SLOW = ["--", "sh", "-c", "echo up; exec sleep 1000"]


def succeeds(ferry: Ferry) -> int:
    return ferry.run("run", *ferry.where(), "--", "true").returncode


def says_no(ferry: Ferry) -> int:
    """A check of `doctor` that fails."""
    ferry.env["PATH"] = fake_smi(ferry.project, then="echo broken; exit 9")["PATH"]
    return ferry.run("doctor", *ferry.where()).returncode


def mistakes(ferry: Ferry) -> int:
    return ferry.run("run", "--nonsense", "--", "true").returncode


def lacks_results(ferry: Ferry) -> int:
    """The last line says what is not here, and what brings it."""
    ferry.write("results", "a file in the way")
    done = ferry.run("run", *ferry.where(), "--", "true")
    last = done.stderr.decode().splitlines()[-1]
    assert last.startswith("not pulled: the results (cannot write ") and last.endswith(
        f"pull {ferry.job().name} --to DIR"
    )
    return done.returncode


def detaches(ferry: Ferry) -> int:
    client = ferry.start("run", *ferry.where(), *SLOW)
    assert client.stdout is not None and client.stdout.readline() == b"up\n"
    return ended(client, signal.SIGINT)


def stalls(ferry: Ferry) -> int:
    return ferry.run("run", *ferry.where(), "--no-pull", "--stall-timeout", "1s", *SLOW).returncode


def reaches_nobody(ferry: Ferry) -> int:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        place = f"me@127.0.0.1:{unused.getsockname()[1]}"
        return ferry.run("run", "--ssh", place, "--", "true").returncode


def is_interrupted(ferry: Ferry) -> int:
    """While it waits for a server that says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = f"me@127.0.0.1:{silent.getsockname()[1]}"
        client = ferry.start("run", "--ssh", place, "--transport", "fabric", "--", "true")
        silent.accept()
        assert client.stderr is not None and b"this folder" not in client.stderr.readline()  # `ID → HOST: …`
        code = ended(client, signal.SIGINT)
    assert not (ferry.state / "jobs").exists()
    return code


def is_not_read(ferry: Ferry) -> int:
    client = ferry.start("run", *ferry.where(), "--", "sh", "-c", "while :; do echo up; done")
    assert client.stdout is not None and client.stdout.readline() == b"up\n"
    client.stdout.close()
    assert client.stderr is not None
    client.stderr.read()
    return client.wait(HANG_S)


def is_stopped(ferry: Ferry) -> int:
    client = ferry.start("run", *ferry.where(), *SLOW)
    assert client.stdout is not None and client.stdout.readline() == b"up\n"
    assert ferry.run("stop", ferry.job_ids()[0], "--grace", "0").returncode == 0
    client.communicate(timeout=HANG_S)
    return client.returncode


def ended(client: subprocess.Popen[bytes], number: int) -> int:
    client.send_signal(number)
    client.communicate(timeout=HANG_S)
    return client.returncode


ENDS: dict[int, Callable[[Ferry], int]] = {
    0: succeeds,
    1: says_no,
    2: mistakes,
    74: lacks_results,
    75: detaches,
    124: stalls,
    125: reaches_nobody,
    130: is_interrupted,
    141: is_not_read,
    143: is_stopped,
}


@pytest.fixture(autouse=True)
def _stopped(ferry: Ferry):
    yield
    for job in ferry.job_ids():
        ferry.run("stop", job, *ferry.where(), "--grace", "0")


@pytest.mark.parametrize("code", [one.code for one in EXIT_CODES])
def test_command_ends_with_each_named_code(ferry: Ferry, code: int) -> None:
    assert ENDS[code](ferry) == code


def test_help_and_manual_name_them_all(ferry: Ferry) -> None:
    assert as_markdown() in (REPO / "docs" / "using.md").read_text()
    said = " ".join(ferry.run("--help").stdout.decode().split())
    for one in EXIT_CODES:
        assert f" {one.code} {one.meaning.replace('`', '')}" in said
    assert OWN in said


def test_jobs_own_code_comes_before_what_is_not_home(ferry: Ferry) -> None:
    done = ferry.run("run", *ferry.where(), "--out", "nothing", "--", "sh", "-c", "exit 7")
    last = done.stderr.decode().splitlines()[-1]
    assert (done.returncode, last) == (7, "not pulled: nothing (the job has no such file)")


def test_outputs_come_home_and_a_line_says_what_stays(ferry: Ferry, server: SshServer) -> None:
    ferry.ssh, ferry.env["TORCHFERRY_SSH_CONFIG"] = ALIAS, str(server.client_config_path)
    ferry.write("kept.txt", "one")
    (ferry.project / "sub").mkdir()
    ferry.write("sub/shipped", "as it was")
    writes = (
        'mkdir out sub/new; echo w > out/w; echo n > sub/new/n; echo two > kept.txt; echo r > "$TORCHFERRY_RUN_DIR"/r'
    )
    words = ["--", "sh", "-c", writes + "; mkdir __pycache__; touch __pycache__/x ./-r"]
    done = ferry.run("run", *ferry.where(), "--out", "./out/", *words)
    assert done.returncode == 0, done.stderr.decode()
    job = ferry.job()
    home = ferry.project / "results" / job.name
    assert (home / "code" / "out" / "w").read_text() == "w\n" and not (home / "r").exists()
    (line,) = [line for line in done.stderr.decode().splitlines() if line.startswith("stays on the host")]
    assert "4 files that the job wrote, 8 B: kept.txt, r, sub/new/n …; " in line
    paths = line.partition(f" pull {job.name} ")[2].removesuffix(" pulls them").split()
    assert sorted(paths) == ["./-r", "kept.txt", "r", "sub/new"]
    assert ferry.run("pull", job.name, *paths).returncode == 0 and (home / "code" / "-r").exists()
    assert [(home / path).read_text() for path in ("code/kept.txt", "code/sub/new/n", "r")] == ["two\n", "n\n", "r\n"]
    assert (ferry.project / "kept.txt").read_text() == "one"


def test_resume_keeps_the_outputs_or_takes_others(ferry: Ferry) -> None:
    program = ["--", "sh", "-c", "echo $TORCHFERRY_ATTEMPT > a; echo b > b; test $TORCHFERRY_ATTEMPT -gt 1"]
    assert ferry.run("run", *ferry.where(), "--out", "a", *program).returncode == 1
    (job_id,) = ferry.job_ids()
    home = ferry.project / "results" / job_id / "code"
    assert (home / "a").read_text() == "1\n"
    assert ferry.run("resume", job_id).returncode == 0
    assert (home / "a").read_text() == "2\n" and not (home / "b").exists()
    assert ferry.run("resume", job_id, "--out", "b").returncode == 0
    assert (home / "b").read_text() == "b\n"
    plan = json.loads((ferry.job() / "job.json").read_text())["plan"]
    assert plan["policy"]["outputs"] == ["b"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_client_that_is_ended_leaves_its_job_with_a_word(ferry: Ferry, number: int) -> None:
    client = ferry.start("run", *ferry.where(), *SLOW)
    assert client.stdout is not None and client.stdout.readline() == b"up\n"
    client.send_signal(number)
    _, err = client.communicate(timeout=HANG_S)
    assert client.returncode == 75 and b"; it goes on without this client" in err


def test_terminal_that_is_closed_during_the_upload_leaves_no_job(ferry: Ferry) -> None:
    """The client has a terminal of its own, which hangs up."""
    (ferry.project / "large").write_bytes(os.urandom(60_000_000))
    leader, follower = os.openpty()
    client = subprocess.Popen(
        ferry.argv("run", *ferry.where(), "--", "sleep", "1000"),
        cwd=ferry.project,
        env=ferry.environment(),
        stdin=follower,
        stdout=follower,
        stderr=follower,
        start_new_session=True,
        preexec_fn=lambda: _take_terminal(follower),
    )
    os.close(follower)
    wait_for(lambda: any((ferry.root / "tmp").glob("*")) if (ferry.root / "tmp").exists() else False)
    os.close(leader)
    assert client.wait(HANG_S) in (75, 130, 141)
    wait_for(lambda: not _runs(ferry.root))
    noted = [path.stem for path in (ferry.state / "jobs").glob("*.json")] if (ferry.state / "jobs").exists() else []
    assert set(ferry.job_ids()) <= set(noted)


def _take_terminal(follower: int) -> None:
    import fcntl
    import termios

    fcntl.ioctl(follower, termios.TIOCSCTTY, 0)


def _runs(root: Path) -> bool:
    return any(json.loads(path.read_text())["state"] == "preparing" for path in root.glob("jobs/*/status.json"))
