"""A secret is in the environment of the job's own processes and nowhere else."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.ferry import Ferry
from tests.support.limits import HANG_S

SECRET = "canary-7f3a91c5e0d24b68"
WAITING = (
    "import hashlib, os, pathlib, time\n"
    "print(hashlib.sha256(os.environ['HF_TOKEN'].encode()).hexdigest())\n"
    "while not pathlib.Path('go').exists(): time.sleep(0.02)\n"
)


@pytest.fixture
def remote(remote: Ferry) -> Ferry:
    """That client, of someone who has a token."""
    remote.env["HF_TOKEN"] = SECRET
    return remote


@contextmanager
def watched_command_lines() -> Iterator[set[str]]:
    """Samples every process's command line all the while; gives those that hold the secret."""
    found: set[str] = set()
    over = threading.Event()

    def sample() -> None:
        while not over.is_set():
            found.update(text for text in map(command_line, processes()) if SECRET in text)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


def processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def holders() -> dict[int, str]:
    """Processes that have the secret in their environment, with their command lines."""
    held = {}
    for pid in processes():
        try:
            if SECRET.encode() in Path(f"/proc/{pid}/environ").read_bytes():
                held[pid] = command_line(pid)
        except OSError:
            continue
    return held


def files_with_secret(*folders: Path) -> list[Path]:
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return [path for path in files if SECRET.encode() in path.read_bytes()]


def test_secret_is_in_the_jobs_own_environment_and_nowhere_else(remote: Ferry, tmp_path: Path) -> None:
    (remote.project / "wait.py").write_text(WAITING)
    words = ("run", "--debug", *remote.where(), "--secret", "HF_TOKEN", "--", "python", "wait.py")
    with watched_command_lines() as shown:
        client = remote.start(*words)
        assert client.stdout.readline().strip().decode() == hashlib.sha256(SECRET.encode()).hexdigest()
        of_the_job = {text.split("\0")[-2] for pid, text in holders().items() if pid != client.pid}
        (remote.job() / "code" / "go").touch()
        out, err = client.communicate(timeout=HANG_S)
    assert client.returncode == 0, err.decode()
    assert of_the_job == {"wait.py"}  # the rank's wrapper and the program: not the supervisor, not the agent
    assert not shown and SECRET.encode() not in out + err
    assert files_with_secret(remote.root, remote.state, remote.project, tmp_path) == []


@pytest.mark.parametrize("how", [("--dry-run",), ("--dry-run", "--json"), ("--dry-run=remote",)])
def test_dry_run_shows_a_secrets_name_only(remote: Ferry, how: tuple[str, ...]) -> None:
    done = remote.run("run", *how, *remote.where(), "--secret", "HF_TOKEN", "--", "true")
    assert done.returncode == 0, done.stderr.decode()
    assert b"HF_TOKEN" in done.stdout and SECRET.encode() not in done.stdout + done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("--python", "/nowhere/python", "--", "python", "-c", "1"),
        ("--gpus", "7", "--", "true"),
        ("--include", "missing", "--", "true"),
        ("--ssh", "127.0.0.1:1", "--", "true"),
        ("--", "sh", "-c", "exit 3"),
    ],
)
def test_failures_with_debug_do_not_show_a_secret(remote: Ferry, words: tuple[str, ...], tmp_path: Path) -> None:
    done = remote.run("run", "--debug", *remote.where(), "--secret", "HF_TOKEN", *words)
    assert done.returncode in (2, 3, 125), done.stderr.decode()
    assert SECRET.encode() not in done.stdout + done.stderr
    assert files_with_secret(tmp_path) == []


def test_secret_that_is_not_set_is_named_and_nothing_started(remote: Ferry) -> None:
    done = remote.run("run", *remote.where(), "--secret", "NO_SUCH_TOKEN", "--", "true")
    assert done.returncode == 2 and b"NO_SUCH_TOKEN is not set" in done.stderr and remote.job_ids() == []


def test_secret_outlives_a_restart_of_the_supervisors_own(remote: Ferry, tmp_path: Path) -> None:
    (remote.project / "again.py").write_text(
        "import os, sys; assert os.environ['HF_TOKEN']; sys.exit(os.environ['TORCHFERRY_ATTEMPT'] == '1')"
    )
    words = ("--max-restarts", "1", "--secret", "HF_TOKEN", "--", "python", "again.py")
    done = remote.run("run", *remote.where(), *words)
    assert done.returncode == 0, done.stderr.decode()
    assert files_with_secret(remote.root, remote.state, tmp_path) == []
