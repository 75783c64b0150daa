"""The ssh program as a transport: when it is chosen, whose connection it uses, and that it leaves nothing behind."""

from __future__ import annotations

import base64
import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from deployer.connection.host import make_transport
from deployer.connection.ssh_transport import why_openssh
from deployer.errors import LostConnection
from deployer.transport.ssh.ssh_config import SshOptions
from deployer.transport.ssh_program.control import BIND_SUFFIX, MAX_ADDRESS, control_path
from tests.support.jobs import wait_for
from tests.support.limits import PATIENCE
from tests.support.sshd import ALIAS, SshServer, make_key, start_sshd
from tests.support.ways import (
    add_to_agent,
    at_terminal,
    authorise,
    connect,
    hang_up,
    public,
    read_all,
    refusal,
    with_config,
)

# --- when it is chosen ------------------------------------------------------------------------------------------------

PLAIN = SshOptions(alias="box", hostname="box", port=22, user="ada")


def security_key(path: Path) -> Path:
    """A key file as ssh-keygen makes it for a FIDO token, as far as its public half."""

    def text(value: bytes) -> bytes:
        return struct.pack(">I", len(value)) + value

    blob = text(b"sk-ssh-ed25519@openssh.com") + text(bytes(32)) + text(b"ssh:")
    body = b"openssh-key-v1\0" + text(b"none") * 2 + text(b"") + struct.pack(">I", 1) + text(blob)
    lines = ("OPENSSH PRIVATE KEY-----", base64.b64encode(body).decode())
    path.write_text(f"-----BEGIN {lines[0]}\n{lines[1]}\n-----END {lines[0]}\n")
    return path


def test_plain_keys_need_no_ssh_program(tmp_path: Path) -> None:
    options = replace(PLAIN, identity_files=(make_key(tmp_path / "key"), tmp_path / "missing"))
    assert why_openssh(options) == ""


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (replace(PLAIN, pkcs11=True), "PKCS11Provider"),
        (replace(PLAIN, known_hosts_command=True), "KnownHostsCommand"),
        (replace(PLAIN, proxy_passes_socket=True), "ProxyUseFdpass"),
        (replace(PLAIN, certificate_files=(Path("/k-cert.pub"),)), "certificate /k-cert.pub"),
        (replace(PLAIN, jump=replace(PLAIN, hostname="hop", pkcs11=True)), "PKCS11Provider (for ada@hop:22)"),
    ],
)
def test_option_that_only_ssh_can_do_is_the_reason(options: SshOptions, reason: str) -> None:
    assert why_openssh(options) == reason


def test_security_key_among_the_identities_is_the_reason(tmp_path: Path) -> None:
    key = security_key(tmp_path / "id_ed25519_sk")
    assert why_openssh(replace(PLAIN, identity_files=(key,))).startswith(f"{key} is a security key")


def test_public_half_of_a_security_key_as_identity_is_the_reason(tmp_path: Path) -> None:
    blob = base64.b64encode(struct.pack(">I", 26) + b"sk-ssh-ed25519@openssh.com").decode()
    (tmp_path / "sk.pub").write_text(f"sk-ssh-ed25519@openssh.com {blob} ada@laptop\n")
    assert "security key" in why_openssh(replace(PLAIN, identity_files=(tmp_path / "sk.pub",)))


def sign(key: Path, *flags: str) -> Path:
    """The authority that made a certificate beside the key."""
    authority = make_key(key.with_name("authority"))
    subprocess.run(["ssh-keygen", "-q", "-s", str(authority), "-I", "me", *flags, f"{key}.pub"], check=True)
    return authority


def test_certificate_in_the_agent_is_the_reason_unless_only_identity_files_count(tmp_path: Path, agent: Path) -> None:
    key = make_key(tmp_path / "key")
    sign(key, "-n", "ada")
    add_to_agent(agent, key)
    options = replace(PLAIN, identity_agent=str(agent))
    assert why_openssh(options) == "the agent holds a key of the type ssh-ed25519-cert-v01@openssh.com"
    assert why_openssh(replace(options, identities_only=True)) == ""


@pytest.mark.parametrize(("valid", "reason"), [(True, "Kerberos ticket"), (False, "")])
def test_kerberos_is_the_reason_only_with_a_valid_ticket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, valid: bool, reason: str
) -> None:
    klist = tmp_path / "klist"  # stands for Kerberos, which needs a realm
    klist.write_text(f"#!/bin/sh\nexit {0 if valid else 1}\n")
    klist.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("KRB5CCNAME", f"FILE:{klist}")
    assert why_openssh(replace(PLAIN, gssapi=True)) == reason


def test_host_with_a_certificate_is_known_by_its_authority_and_the_choice_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    certificate = f"HostCertificate {tmp_path}/sshd/host_key-cert.pub"
    with start_sshd(tmp_path, extra_config=certificate) as server:
        authority = sign(server.host_key_path, "-h", "-n", server.host)
        server.known_hosts_path.write_text(f"@cert-authority {server.host} {public(authority)}\n")
        os.kill(server.process.pid, signal.SIGHUP)  # reads the certificate
        wait_for(lambda: server.log_path.read_text().count("Server listening") == 2)
        transport = connect(server, way="auto")
        assert read_all(transport.open("echo in")) == b"in\n"
        transport.close()
    assert "connecting with the ssh program" in capfd.readouterr().err


def test_ssh_program_is_used_without_loading_an_ssh_library(server: SshServer) -> None:
    code = (
        "import sys\nfrom deployer.connection.host import make_transport\n"
        "transport = make_transport(sys.argv[1], config_file=sys.argv[2], way='openssh')\ntransport.connect()\n"
        "print(transport.open('echo up').read(10), {'paramiko', 'fabric', 'cryptography'} & set(sys.modules))"
    )
    argv = [sys.executable, "-c", code, ALIAS, str(server.client_config_path)]
    assert subprocess.run(argv, capture_output=True, text=True).stdout == "b'up\\n' set()\n"


# --- a ControlMaster of the user's ------------------------------------------------------------------------------------


@contextmanager
def users_master(config: str) -> Iterator[subprocess.Popen[bytes]]:
    """A connection that the user holds open in another window."""
    process = subprocess.Popen(["ssh", "-F", config, "-M", "-N", ALIAS], stdin=subprocess.DEVNULL)
    try:
        check = ["ssh", "-F", config, "-O", "check", ALIAS]
        wait_for(lambda: subprocess.run(check, capture_output=True).returncode == 0)
        yield process
    finally:
        process.kill()
        process.wait()


def logins(server: SshServer) -> int:
    return server.log_path.read_text().count("Accepted publickey")


@pytest.fixture
def shared(server: SshServer) -> Iterator[str]:
    """A config with ControlMaster auto."""
    with tempfile.TemporaryDirectory(prefix="tf-") as folder:  # pytest's are too long for a socket
        yield with_config(server, Path(folder), ControlMaster="auto", ControlPath=f"{folder}/%C")


@pytest.mark.parametrize("way", ["auto", "openssh"])
def test_live_control_master_of_the_user_carries_our_streams(server: SshServer, shared: str, way: str) -> None:
    with users_master(shared):
        before = logins(server)
        transport = connect(server, config=shared, way=way)
        streams = [transport.open("cat"), transport.open("echo in")]
        assert read_all(streams[1]) == b"in\n"
        transport.close()
        assert logins(server) == before


@pytest.mark.parametrize("way", ["auto", "openssh", "fabric"])
def test_control_master_that_hangs_does_not_touch_us(server: SshServer, shared: str, way: str) -> None:
    with users_master(shared) as process:
        process.send_signal(signal.SIGSTOP)
        begun = time.monotonic()
        transport = connect(server, config=shared, way=way)
        assert read_all(transport.open("echo in")) == b"in\n"
        assert time.monotonic() - begun < 60 * PATIENCE  # it would hang for ever
        transport.close()


@pytest.mark.parametrize("way", ["auto", "openssh"])
def test_control_socket_without_a_master_does_not_touch_us(server: SshServer, shared: str, way: str) -> None:
    with users_master(shared):
        pass  # killed: it leaves its socket
    assert list(Path(shared).parent.glob("[0-9a-f]" * 40))
    transport = connect(server, config=shared, way=way)
    assert read_all(transport.open("echo in")) == b"in\n"
    transport.close()


def test_control_master_whose_host_is_silent_is_passed_over(server: SshServer, shared: str) -> None:
    with users_master(shared):
        transport = make_transport(ALIAS, config_file=shared, way="openssh")
        transport.connect()
        (session,) = newest_sessions(server, 1)
        os.kill(session, signal.SIGSTOP)
        assert read_all(transport.open("echo in")) == b"in\n"
        transport.close()
        os.kill(session, signal.SIGKILL)


def newest_sessions(server: SshServer, count: int) -> list[int]:
    pid = server.process.pid
    return sorted(int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split())[-count:]


# --- our own connection -----------------------------------------------------------------------------------------------


def test_streams_of_one_transport_log_in_once(server: SshServer) -> None:
    before = logins(server)
    transport = connect(server, way="openssh")
    for _ in range(3):
        assert read_all(transport.open("echo in")) == b"in\n"
    transport.close()
    assert logins(server) == before + 1


def test_key_file_with_signs_that_ssh_expands_is_used(server: SshServer, tmp_path: Path) -> None:
    key = make_key(tmp_path / "100% %h ~")
    authorise(server, key)
    connect(server, way="openssh", ssh_key=str(key)).close()


def test_settings_of_the_user_that_change_a_session_do_not_change_ours(server: SshServer, tmp_path: Path) -> None:
    odd = {"RemoteCommand": "echo odd", "RequestTTY": "force", "LogLevel": "QUIET", "StdinNull": "yes"}
    odd |= {"LocalForward": f"{server.port} localhost:1", "EscapeChar": "none", "SessionType": "none"}
    odd |= {"ForkAfterAuthentication": "yes", "PermitLocalCommand": "yes", "LocalCommand": f"touch {tmp_path}/ran"}
    transport = connect(server, config=with_config(server, tmp_path, **odd), way="openssh")
    stream = transport.open("cat")
    stream.write(b"~.\nin\r\n")
    stream.close_write()
    assert read_all(stream) == b"~.\nin\r\n"
    transport.close()
    assert not (tmp_path / "ran").exists()


def test_status_255_of_a_command_is_no_lost_connection(server: SshServer) -> None:
    transport = connect(server, way="openssh")
    stream = transport.open("echo in; exit 255")
    assert read_all(stream) == b"in\n"
    transport.close()


def test_connection_that_broke_says_why_and_is_made_again(tmp_path: Path) -> None:
    with start_sshd(tmp_path) as server:
        transport = connect(server, way="openssh")
        hang_up(server)
        with pytest.raises(LostConnection, match="closed by remote host"):
            wait_for(lambda: transport.open("sleep 9").read(1))
        transport.connect()
        assert read_all(transport.open("echo again")) == b"again\n"
        transport.close()


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where this test's clients have their control sockets."""
    with tempfile.TemporaryDirectory(prefix="tf-") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)


def is_clean(runtime: Path) -> bool:
    """Whether no control socket and no process that holds one is left."""
    return not list(runtime.glob("*/*")) and not any(str(runtime) in command for command in command_lines())


def command_lines() -> Iterator[str]:
    for process in Path("/proc").iterdir():  # not a glob for them: it stumbles over one that ends meanwhile
        try:
            yield os.fsdecode((process / "cmdline").read_bytes())
        except OSError:  # it has ended
            continue


@pytest.mark.parametrize("ending", ["sys.exit()", "os._exit(0)", "os.kill(os.getpid(), 9)"])
def test_client_that_ends_in_any_way_leaves_no_process_and_no_socket(
    server: SshServer, runtime: Path, ending: str
) -> None:
    code = (
        "import os, sys\nfrom deployer.connection.host import make_transport\n"
        "transport = make_transport(sys.argv[1], config_file=sys.argv[2], way='openssh')\ntransport.connect()\n"
        f"stream = transport.open('echo $PPID; exec cat')\nprint(stream.read(10).decode(), flush=True)\n{ending}"
    )
    argv = [sys.executable, "-c", code, ALIAS, str(server.client_config_path)]
    session = subprocess.run(argv, capture_output=True, text=True).stdout.strip()
    wait_for(lambda: not Path(f"/proc/{session}").exists() and is_clean(runtime))


_INTERRUPTED = """
import glob, os, signal, sys, time
from deployer.connection.host import make_transport
from tests.support.limits import HANG_S
signal.signal(signal.SIGINT, lambda *_: None)
if os.fork():  # the shell that the client was started from, which stays
    os.wait()
    deadline = time.monotonic() + HANG_S
    while time.monotonic() < deadline and glob.glob(os.environ["XDG_RUNTIME_DIR"] + "/*/*"):
        time.sleep(0.05)
    print("LEFT", glob.glob(os.environ["XDG_RUNTIME_DIR"] + "/*/*"), flush=True)
    sys.exit()
INTERRUPT
transport = make_transport(sys.argv[1], config_file=sys.argv[2], way=sys.argv[3])
transport.connect()
stream = transport.open("cat")
os.killpg(0, signal.SIGINT)  # as the terminal does for Ctrl-C
time.sleep(0.2)
stream.write(b"still here")
print("GOT", stream.read(100), flush=True)
"""


@pytest.mark.parametrize(
    ("answer", "on_interrupt", "outcome"),
    [
        ("open sesame", "", "GOT b'still here'"),
        ("\x03", "signal.signal(signal.SIGINT, signal.default_int_handler)", ""),
    ],
)
def test_interrupt_at_the_terminal_costs_no_connection_but_a_login_and_leaves_nothing(
    server: SshServer, tmp_path: Path, runtime: Path, answer: str, on_interrupt: str, outcome: str
) -> None:
    key = make_key(tmp_path / "locked", passphrase="open sesame")
    authorise(server, key)
    config = with_config(server, tmp_path, IdentityFile=str(key))
    program = _INTERRUPTED.replace("INTERRUPT", on_interrupt)
    screen = at_terminal(config, {"assphrase": answer}, way="openssh", program=program)
    assert outcome in screen and ("GOT" in screen) is bool(outcome)
    assert "LEFT []" in screen


# --- control sockets --------------------------------------------------------------------------------------------------


@pytest.fixture
def long_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("XDG_RUNTIME_DIR", "HOME", "TMPDIR"):
        monkeypatch.setenv(variable, str(tmp_path / ("n" * 120)))


@pytest.mark.usefixtures("long_names")
def test_control_path_fits_an_address_however_long_the_names_are(server: SshServer) -> None:
    path = Path(control_path())
    assert len(str(path)) + BIND_SUFFIX < MAX_ADDRESS
    assert path.parent.stat().st_mode & 0o777 == 0o700
    transport = connect(server, way="openssh")
    assert read_all(transport.open("echo in")) == b"in\n"
    transport.close()


@pytest.mark.usefixtures("long_names")
def test_user_of_64_characters_is_refused_by_the_server_and_by_nothing_before_it(server: SshServer) -> None:
    user = "u" * 64
    error = refusal(str(server.client_config_path), address=f"{user}@{ALIAS}", way="openssh")
    assert f"for user '{user}'" in error.message


def test_folder_for_control_sockets_that_somebody_planted_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = Path(f"/tmp/tf-test-{os.getpid()}")
    runtime.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    (tmp_path / "trap").mkdir()
    (runtime / "torchferry").symlink_to(tmp_path / "trap")
    try:
        assert Path(control_path()).parent == Path(f"/tmp/torchferry-{os.getuid()}")
    finally:
        (runtime / "torchferry").unlink()
        runtime.rmdir()
