"""What another user of the host put at our paths before us is refused, and nothing of it is run or written through."""

from __future__ import annotations

import os
import pwd
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ferry import Ferry
from tests.support.sshd import ALIAS, SshServer, login_user, start_sshd


@pytest.fixture(scope="module")
def mallory() -> Iterator[str]:
    with login_user("/bin/bash") as user:
        yield user


@pytest.fixture(scope="module")
def victim_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServer]:
    with login_user("/bin/sh") as user, start_sshd(tmp_path_factory.mktemp("s"), user=user) as server:
        yield server


@pytest.fixture
def victim(ferry: Ferry, victim_server: SshServer) -> Iterator[Ferry]:
    """A client that logs in as another user than root, with its remote root in a folder that all may write to."""
    shared = Path(subprocess.check_output(["mktemp", "-d", "/tmp/tf-planted-XXXXXX"], text=True).strip())
    shared.chmod(0o1777)
    ferry.ssh, ferry.root = ALIAS, shared / "root"
    ferry.env["TORCHFERRY_SSH_CONFIG"] = str(victim_server.client_config_path)
    yield ferry
    subprocess.run(["rm", "-rf", str(shared)], check=True)


def give(path: Path, user: str) -> None:
    account = pwd.getpwnam(user)
    os.chown(path, account.pw_uid, account.pw_gid, follow_symlinks=False)


def refused(done: subprocess.CompletedProcess[bytes]) -> bool:
    words = b"belongs to another user" in done.stderr and b"--remote-root" in done.stderr
    return done.returncode == 125 and words and b"Traceback" not in done.stderr


def test_root_of_ones_own_in_a_shared_folder_is_used(victim: Ferry) -> None:
    assert victim.run("run", *victim.where(), "--no-pull", "--", "true").returncode == 0
    assert victim.run("run", *victim.where(), "--no-pull", "--", "true").returncode == 0


def test_root_planted_as_a_folder_is_refused(victim: Ferry, mallory: str) -> None:
    victim.root.mkdir(mode=0o777)
    victim.root.chmod(0o777)
    give(victim.root, mallory)
    assert refused(victim.run("run", *victim.where(), "--", "true"))
    assert list(victim.root.iterdir()) == []


def test_root_planted_as_a_link_is_refused(victim: Ferry, mallory: str) -> None:
    elsewhere = victim.root.with_name("elsewhere")
    elsewhere.mkdir()
    elsewhere.chmod(0o777)
    victim.root.symlink_to(elsewhere)
    give(victim.root, mallory)
    assert refused(victim.run("run", *victim.where(), "--", "true"))
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("name", ["agent", "jobs"])
def test_folder_planted_in_a_root_that_all_may_write_to_is_refused(
    victim: Ferry, victim_server: SshServer, mallory: str, name: str
) -> None:
    victim.root.mkdir()
    give(victim.root, victim_server.user)
    victim.root.chmod(0o1777)
    planted = victim.root / name
    planted.mkdir()
    planted.chmod(0o777)
    give(planted, mallory)
    assert refused(victim.run("run", *victim.where(), "--", "true"))


def test_root_where_all_may_rename_and_replace_is_refused(victim: Ferry, victim_server: SshServer) -> None:
    victim.root.mkdir()
    give(victim.root, victim_server.user)
    victim.root.chmod(0o777)
    (victim.project / "large.bin").write_bytes(os.urandom(3 << 20))  # being sent when the host refuses
    done = victim.run("run", *victim.where(), "--", "true")
    assert (done.returncode, b"trying again" in done.stderr) == (125, False), done.stderr.decode()
    assert f"{victim.root}: other users can write into it (mode 777)".encode() in done.stderr
    assert b"chmod go-w or +t" in done.stderr and b".torchferry-trusted" in done.stderr
    assert list(victim.root.iterdir()) == []


def test_agent_of_another_user_is_not_run(victim: Ferry, victim_server: SshServer, mallory: str) -> None:
    assert victim.run("ps", *victim.where()).returncode == 0
    (agent,) = (victim.root / "agent").iterdir()
    serve = agent / "agent" / "serve.py"
    serve.write_text("import os; os.system('touch /tmp/torchferry-was-here')\n")
    give(victim.root / "agent", mallory)
    assert refused(victim.run("run", *victim.where(), "--", "true"))
    assert not Path("/tmp/torchferry-was-here").exists()
