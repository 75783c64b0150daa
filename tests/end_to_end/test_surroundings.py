"""The whole way in surroundings that are no developer's machine: strict hosts, and deploys that are cut short."""

from __future__ import annotations

import json
import os
import pwd
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deployer.agent.host.layout import Job
from tests.support.ferry import Ferry
from tests.support.jobs import said
from tests.support.sshd import ALIAS, login_user, start_sshd

UP = "import time\nprint('up', flush=True)\ntime.sleep(1000)"
HIDEPID = ("unshare", "-m", "sh", "-c", 'mount -t proc -o hidepid=2 proc /proc && exec "$@"', "sh")
"""Before a command: it sees the processes of its own user only, unless it is root's."""


@pytest.fixture
def strict(ferry: Ferry, tmp_path: Path) -> Iterator[Ferry]:
    """The client of a plain user on a host with a umask of 077, hidden processes and a root where nothing may be
    executed."""
    with login_user("/bin/bash") as user:
        folder = Path(tempfile.mkdtemp(prefix="tf-noexec-"))  # pytest's folders are not for others
        options = f"size=100m,noexec,nosuid,uid={user}"
        if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", folder], check=False).returncode:
            pytest.skip("mounting needs root")
        try:
            with start_sshd(tmp_path, user=user, run_by=HIDEPID) as server:
                (server.home / ".bashrc").write_text("umask 077\n")
                ferry.ssh, ferry.root = ALIAS, folder / "tf"
                ferry.env["TORCHFERRY_SSH_CONFIG"] = str(server.client_config_path)
                yield ferry
        finally:
            subprocess.run(["umount", "-l", folder], check=True)
            folder.rmdir()


def test_plain_user_on_a_strict_host_has_the_whole_way(strict: Ferry) -> None:
    (strict.project / "tool.sh").write_text("echo 'from a tool'; umask\n")
    done = strict.run("run", *strict.where(), "--name", "tool", "--", "sh", "tool.sh")
    assert (done.returncode, done.stdout) == (0, b"from a tool\n0077\n"), done.stderr.decode()
    begun = strict.run("run", *strict.where(), "--detach", "--name", "long", "--", "python3", "-c", UP)
    assert begun.returncode == 0, begun.stderr.decode()
    (job_id,) = [i for i in strict.job_ids() if i.startswith("long")]
    said(Job(str(strict.job(job_id))), "up")
    rows = {row["id"]: row["state"] for row in json.loads(strict.run("ps", "--json", *strict.where()).stdout)}
    assert rows[job_id] == "running"
    stopped = strict.run("stop", job_id, "--grace", "5", "--json")
    (end,) = json.loads(stopped.stdout)
    assert (stopped.returncode, end["state"], end["ended"], end["remaining"]) == (0, "stopped", 2, [])
    assert (strict.project / "results").exists()


LOOKS = """
import os, time
print('up', flush=True)
while not os.path.exists('go'):
    versions = {open(name).read()[:2] for name in ('a', 'b', 'c')}
    if versions != {'v1'}:
        print('mixed', versions)
    time.sleep(0.001)
"""


def test_job_sees_its_own_tree_while_deploys_of_the_next_one_are_cut(ferry: Ferry) -> None:
    def write(version: str) -> None:
        for name in "abc":
            (ferry.project / name).write_text(version + name * 300_000)

    chance = random.Random(50)
    run = ("run", *ferry.where(), "--no-pull", "--python", sys.executable)
    write("v1")
    assert ferry.run(*run, "--detach", "--name", "old", "--", "python", "-c", LOOKS).returncode == 0
    (old,) = ferry.job_ids()
    said(Job(str(ferry.job(old))), "up")
    write("v2")
    for _ in range(6):
        client = ferry.start(*run, "--", "cat", "a")
        time.sleep(chance.uniform(0.15, 0.6))  # the cut is anywhere
        os.kill(client.pid, signal.SIGKILL)
        client.communicate()
    new = ferry.run(*run, "--name", "new", "--", "sh", "-c", "cut -c -2 a b c")
    (ferry.job(old) / "code" / "go").touch()
    assert ferry.run("logs", old, "-f").stdout == b"up\n"
    assert new.stdout == b"v2\nv2\nv2\n", new.stderr.decode()


def test_host_with_nothing_but_a_shell_and_python_has_the_whole_way(ferry: Ferry, tmp_path: Path) -> None:
    bare = tmp_path / "bin"
    bare.mkdir()
    (bare / "python3").symlink_to(sys.executable)
    ferry.env["PATH"] = str(bare)  # no git, ssh, rsync, tmux, setsid, flock or sha256sum, on neither side
    done = ferry.run("run", *ferry.where(), "--", "python3", "-c", "import shutil; print(shutil.which('cat'))")
    assert (done.returncode, done.stdout) == (0, b"None\n"), done.stderr.decode()
    (job_id,) = ferry.job_ids()
    for words in (("status", job_id), ("logs", job_id), ("stop", job_id), ("pull", job_id), ("ps",)):
        assert ferry.run(*words).returncode == 0


def test_empty_home_is_the_accounts_for_client_host_and_job(ferry: Ferry) -> None:
    ferry.env["HOME"] = ""
    done = ferry.run("run", *ferry.where(), "--no-pull", "--", "sh", "-c", 'echo "$HOME"')
    assert (done.returncode, done.stdout.decode().strip()) == (0, pwd.getpwuid(os.getuid()).pw_dir), done.stderr
