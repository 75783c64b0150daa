"""Which host a command means is decided once: one login, in the same way, whoever says where it is."""

from __future__ import annotations

import json

import pytest

from tests.support.ferry import Ferry
from tests.support.sshd import SshServer


def logins(server: SshServer) -> int:
    return server.log_path.read_text().count("Accepted publickey")


CONFIG = "target: {{ssh: {ssh}, root: {root}, device: cpu}}\nscript: hello.sh\ntorchrun: false\n"


@pytest.mark.parametrize("transport", ["fabric", "openssh"])
@pytest.mark.parametrize("by_option", [True, False], ids=["option", "config"])
def test_one_login_wherever_address_and_folder_are_said(
    remote: Ferry, server: SshServer, transport: str, by_option: bool
) -> None:
    remote.write("hello.py", "print('there')\n")
    folder = remote.root / "of the config"
    text = CONFIG.format(ssh=json.dumps("elsewhere" if by_option else remote.ssh), root=json.dumps(str(folder)))
    remote.write("a.yaml", text.replace("hello.sh", "hello.py"))
    before = logins(server)
    words = ("--ssh", str(remote.ssh)) if by_option else ()
    done = remote.run("a.yaml", *words, "--transport", transport, "--no-pull")
    assert (done.returncode, done.stdout) == (0, b"there\n"), done.stderr.decode()
    assert logins(server) == before + 1
    assert [path.name for path in folder.iterdir() if path.name == "jobs"] == ["jobs"]
    (record,) = json.loads(remote.run("ps", "--json", "--all").stdout)
    resumed = remote.run("resume", record["id"], "--no-pull")
    assert resumed.stdout == b"there\n" and logins(server) == before + 3  # and `ps`


@pytest.mark.parametrize(
    "words",
    [
        ("run", "--", "true"),
        ("run", "--dry-run", "--", "true"),
        ("a.yaml",),
        ("gpus",),
        ("ps", "--remote-root", "/r"),
        ("stop", "--remote-root", "/r", "job-1"),
    ],
)
def test_key_for_a_host_that_nobody_names_is_refused(ferry: Ferry, words: tuple[str, ...]) -> None:
    ferry.write("a.yaml", "target: {device: cpu}\nscript: hello.py\n")
    ferry.write("hello.py", "")
    done = ferry.run(words[0], "--ssh-key", "/key", *words[1:])
    assert done.returncode == 2
    assert b"--ssh-key names a key for --ssh, and there is none: this machine is meant\n" in done.stderr
    assert not ferry.root.exists()


def test_key_goes_to_the_hosts_of_all_jobs_and_not_to_this_machine(ferry: Ferry) -> None:
    assert ferry.run("run", *ferry.where(), "--no-pull", "--", "true").returncode == 0
    done = ferry.run("ps", "--ssh-key", "/key", "--all", "--json")
    assert done.returncode == 0 and [row["state"] for row in json.loads(done.stdout)] == ["succeeded"]
