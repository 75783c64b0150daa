"""What ssh does the same: how often the user's commands run, which settings count, what a provider's command means."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from deployer.connection.host import Host, make_transport
from deployer.connection.link import Link
from deployer.connection.ssh_transport import limits_of
from deployer.errors import LostConnection, UsageError
from deployer.transport.protocol import Limits
from deployer.transport.ssh.ssh_config import resolve
from deployer.transport.ssh.target import parse_target
from tests.support.ferry import Ferry
from tests.support.limits import PATIENCE, patient
from tests.support.sshd import ALIAS, SshServer, start_sshd
from tests.support.ways import (
    both_ways,
    children,
    connect,
    hang_up,
    public,
    read_all,
    refusal,
    relay_command,
    with_config,
)

# --- the user's commands ----------------------------------------------------------------------------------------------


def counting_config(server: SshServer, folder: Path) -> Path:
    """A config whose ProxyCommand and `Match exec` note each of their runs in the folder."""
    config = Path(
        with_config(server, folder, ProxyCommand=f'sh -c "echo run >>{folder}/proxy; exec {relay_command(folder)}"')
    )
    config.write_text(f'Match exec "echo run >>{folder}/match"\n    ServerAliveInterval 77\n{config.read_text()}')
    return config


def runs(folder: Path) -> dict[str, int]:
    """How often each command has run since it was asked for the last time."""
    counts = {}
    for name in ("proxy", "match"):
        counts[name] = (folder / name).read_text().count("run")
        (folder / name).unlink()
    return counts


@pytest.mark.parametrize("way", ["auto", "fabric", "openssh"])
def test_proxy_command_and_match_exec_run_as_often_as_with_ssh(server: SshServer, tmp_path: Path, way: str) -> None:
    config = counting_config(server, tmp_path)
    subprocess.run(["ssh", "-F", str(config), ALIAS, "true"], check=True, stdin=subprocess.DEVNULL)
    with_ssh = runs(tmp_path)
    transport = connect(server, config=str(config), way=way)
    for _ in range(2):
        assert read_all(transport.open("echo in")) == b"in\n"
    transport.close()
    assert runs(tmp_path) == with_ssh


@both_ways
def test_proxy_command_that_fails_is_run_once(tmp_path: Path, way: str) -> None:
    config = tmp_path / "config"
    config.write_text(
        f"Host {ALIAS}\n ProxyCommand sh -c 'echo run >>{tmp_path}/proxy; echo token expired >&2; exit 3'\n"
    )
    error = refusal(str(config), way=way)
    assert error.where == ("host: token expired",)
    assert (tmp_path / "proxy").read_text() == "run\n"


# --- settings of ssh_config -------------------------------------------------------------------------------------------


@both_ways
def test_silent_peer_is_noticed_as_server_alive_settings_say(tmp_path: Path, way: str) -> None:
    with start_sshd(tmp_path) as server:
        settings = {"ServerAliveInterval": "1", "ServerAliveCountMax": str(patient(2))}
        transport = connect(server, config=with_config(server, tmp_path, **settings), way=way)
        link = Link.open(transport, root=str(tmp_path / "root"))
        link.wait_ready()
        for session in children(server.process.pid):
            os.kill(session, signal.SIGSTOP)
        begun = time.monotonic()
        with pytest.raises(LostConnection):
            link.call("ps").result("jobs")
        assert patient(2) - 1 < time.monotonic() - begun < 12 * PATIENCE  # 35 s are the usual limit
        transport.close()
        hang_up(server)


def test_limits_are_the_usual_ones_unless_they_are_set(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(
        "Host set\n ServerAliveInterval 60\n ServerAliveCountMax 10\n ConnectTimeout 90\n ConnectionAttempts 3\n"
    )
    usual = resolve(parse_target("other"), config_file=str(config))
    given = resolve(parse_target("set"), config_file=str(config))
    assert limits_of(usual) == Limits() and usual.connection_attempts == 1
    assert limits_of(given) == Limits(login_s=90, ping_every_s=60, dead_after_s=600) and given.connection_attempts == 3


# --- algorithms -------------------------------------------------------------------------------------------------------

ODD = "Ciphers chacha20-poly1305@openssh.com\nKexAlgorithms sntrup761x25519-sha512@openssh.com"


def test_server_whose_algorithms_paramiko_lacks_is_reached_by_the_ssh_program(
    tmp_path: Path, foreign_key: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with start_sshd(tmp_path, first_config=ODD) as server:
        transport = connect(server, way="auto")
        assert read_all(transport.open("echo in")) == b"in\n"
        transport.close()
        assert "connecting with the ssh program: " in capfd.readouterr().err
        error = refusal(str(server.client_config_path), way="fabric")
        assert "offers no key exchange method that this side has: sntrup761x25519-sha512@openssh.com" in error.message
        server.known_hosts_path.write_text(f"{server.host_name} {public(foreign_key)}\n")
        assert "has changed" in refusal(str(server.client_config_path), way="auto").message
        config = server.client_config_path.read_text().partition("\n")[2]
        (tmp_path / "plain").write_text(f"Host {ALIAS}\n{config}")
        monkeypatch.setenv("PATH", str(tmp_path))
        assert "install the OpenSSH client" in refusal(str(tmp_path / "plain"), way="auto").where[0]


# --- what providers print ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "address", "key", "ignored"),
    [
        ("ssh -p 2222 root@192.0.2.7 -L 8080:localhost:8080", "root@192.0.2.7:2222", None, ("-L 8080:localhost:8080",)),
        ("ssh root@box -p 22 -i ~/.ssh/id_ed25519", "root@box:22", "~/.ssh/id_ed25519", ()),
        ("box -p 22", "box:22", None, ()),
        ("ssh -l ada -p22 box", "ada@box:22", None, ()),
        ("ssh ssh://ada@box:22", "ada@box:22", None, ()),
        ("ssh -i 'my key.pem' ubuntu@box", "ubuntu@box", "my key.pem", ()),
        ("ssh -Nf -D 1080 -A box", "box", None, ("-N", "-f", "-D 1080", "-A")),
        ("ssh -J a,b@c:2 box", "ssh -o ProxyJump=a,b@c:2 box", None, ()),
        (
            "ssh -6 -o Port=22 -o LogLevel=QUIET ::1",
            "ssh -o AddressFamily=inet6 -o Port=22 ::1",
            None,
            ("-o LogLevel=QUIET",),
        ),
        ("ssh -F other box", "ssh -F other box", None, ()),
    ],
)
def test_command_that_a_provider_prints_is_read(
    text: str, address: str, key: str | None, ignored: tuple[str, ...]
) -> None:
    target = parse_target(text)
    assert (target.address, target.key, target.ignored) == (address, key, ignored)
    assert parse_target(address).address == address


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("ssh root@box -p 22 nvidia-smi -L", "--ssh root@box:22"),
        ("192.0.2.7 22022", "--ssh 192.0.2.7:22022"),
        ("ssh -p 22", "[user@]host[:port]"),
        ("ssh -oProxyCommand=id box", "~/.ssh/config"),
        ("ssh -o 'KnownHostsCommand id' box", "~/.ssh/config"),
        ("ssh -J '-oX y' box", "-J takes"),
        ("ssh 'box", "[user@]host[:port]"),
        ("ssh -p x box", "1 to 65535"),
    ],
)
def test_command_that_is_no_address_is_refused_with_the_address_that_it_should_be(text: str, advice: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_target(text)
    assert advice in caught.value.hint


@both_ways
def test_options_of_a_whole_command_count_as_with_ssh(server: SshServer, tmp_path: Path, way: str) -> None:
    known = f"-o UserKnownHostsFile={server.known_hosts_path} -o IdentitiesOnly=yes"
    (tmp_path / "empty").write_text("")
    text = f"ssh -F {tmp_path}/empty -l {server.user} -o Port={server.port} -i {server.key_path} {known} 127.0.0.1"
    transport = make_transport(text, way=way)
    transport.connect()
    assert read_all(transport.open("echo in")) == b"in\n"
    transport.close()


def test_host_of_a_whole_command_has_the_plain_address_and_says_what_is_without_effect(
    capsys: pytest.CaptureFixture[str],
) -> None:
    host = Host("ssh -p 7 ada@box -i key -L 1:box:1", "~/root")
    assert (host.name, host.ssh_key) == ("ada@box:7", "key")
    assert "without effect in --ssh: -L 1:box:1" in capsys.readouterr().err


# --- nothing is left of what did not begin ----------------------------------------------------------------------------


@both_ways
def test_launch_on_a_login_that_does_not_run_our_command_leaves_nothing(tmp_path: Path, ferry: Ferry, way: str) -> None:
    with start_sshd(tmp_path, first_config="ForceCommand echo the token has expired; exit 3") as server:
        ferry.ssh, ferry.transport = ALIAS, way
        ferry.env["TORCHFERRY_SSH_CONFIG"] = str(server.client_config_path)
        done = ferry.run("run", *ferry.where(), "--device", "cpu", "--", "true")
        assert done.returncode == 125, done.stderr
        assert b"host: the token has expired" in done.stderr and b"runs on" not in done.stderr
        assert server.log_path.read_text().count("Accepted publickey") == 1
    assert not list((tmp_path / "state").glob("jobs/*"))
