"""Streams by both transports to a real sshd, and to this machine: bytes, login shells, breaks, hosts without exec."""

from __future__ import annotations

import base64
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import paramiko
import pytest

from deployer.connection.command import build_command
from deployer.connection.host import make_transport
from deployer.connection.link import Link
from deployer.errors import FerryError, HostError, LostConnection
from deployer.transport.local import LocalTransport
from deployer.transport.protocol import Transport
from deployer.transport.ssh.explain import explain_no_answer
from tests.support.limits import HANG_S, PATIENCE
from tests.support.sshd import ALIAS, SshServer, login_user, start_sshd
from tests.support.ways import address_config, both_ways, children, connect, hang_up, read_all

MIB = 1 << 20

MIB = 1 << 20


@pytest.fixture(params=["fabric", "openssh", "local"])
def transport(request: pytest.FixtureRequest, server: SshServer) -> Iterator[Transport]:
    made = connect(server, way=request.param) if request.param != "local" else LocalTransport()
    yield made
    made.close()


# --- streams: the same over SSH and on this machine -------------------------------------------------------------------


def test_stream_of_a_command_gives_output_stderr_and_status(transport: Transport) -> None:
    stream = transport.open("echo out; echo err >&2; exit 7")
    assert read_all(stream) == b"out\n"
    assert stream.exit_status(HANG_S) == 7
    assert stream.stderr_text() == "err\n"


def test_stream_echoes_every_byte_value_until_its_input_is_closed(transport: Transport) -> None:
    stream = transport.open("cat")
    sent = bytes(range(256)) * 4096
    writer = threading.Thread(target=lambda: (stream.write(sent), stream.close_write()))
    writer.start()
    assert read_all(stream) == sent
    writer.join()
    assert stream.exit_status(HANG_S) == 0


def test_stream_with_ten_mib_on_both_outputs_does_not_stall(transport: Transport) -> None:
    script = "import sys\nfor _ in range(160): sys.stdout.write('o' * 65536); sys.stderr.write('e' * 65536)"
    stream = transport.open(f'{sys.executable} -S -c "{script}"')
    assert len(read_all(stream)) == 10 * MIB
    assert stream.exit_status(HANG_S) == 0
    assert stream.stderr_text() == "e" * 65536


def test_stream_gives_the_status_that_follows_fifty_mib(transport: Transport) -> None:
    stream = transport.open("head -c 52428800 /dev/zero; exit 7")
    total = 0
    while data := stream.read(1 << 16):
        total += len(data)
    assert (total, stream.exit_status(HANG_S)) == (50 * MIB, 7)


def test_exit_status_of_a_process_that_stays_is_none_within_its_time(transport: Transport) -> None:
    stream = transport.open("exec sleep 1000")
    begun = time.monotonic()
    assert stream.exit_status(0.3) is None
    assert time.monotonic() - begun < 60 * PATIENCE
    stream.close()


def test_close_wakes_a_blocked_read(transport: Transport) -> None:
    stream = transport.open("echo up; exec cat")
    assert stream.read(100) == b"up\n"
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(stream.read(100)))
    reader.start()
    stream.close()
    reader.join(HANG_S)
    assert got == [b""]


def test_write_to_a_process_that_has_gone_says_so(transport: Transport) -> None:
    stream = transport.open("exit 0")
    assert read_all(stream) == b""
    stream.exit_status(HANG_S)
    with pytest.raises(LostConnection, match="takes no more input"):
        for _ in range(50):
            stream.write(b"x" * 65536)


def test_streams_of_one_transport_run_side_by_side(transport: Transport) -> None:
    streams = [transport.open("cat") for _ in range(3)]
    for number, stream in enumerate(streams):
        stream.write(b"%d" % number)
        stream.close_write()
    assert [read_all(stream) for stream in streams] == [b"0", b"1", b"2"]


@both_ways
def test_threads_that_connect_at_once_share_one_connection(server: SshServer, way: str) -> None:
    before = server.log_path.read_text().count("Accepted publickey")
    transport = make_transport(ALIAS, config_file=str(server.client_config_path), way=way)

    def use(_: int) -> bytes:
        transport.connect()
        return read_all(transport.open("echo in"))

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(use, range(4))) == [b"in\n"] * 4
    transport.close()
    assert server.log_path.read_text().count("Accepted publickey") == before + 1


def test_local_process_has_a_session_of_its_own() -> None:
    stream = LocalTransport().open(f"{sys.executable} -c 'import os; print(os.getsid(0))'")
    assert int(read_all(stream)) != os.getsid(0)


def test_local_process_ended_by_a_signal_has_a_shells_status() -> None:
    stream = LocalTransport().open("kill -9 $$")
    assert read_all(stream) == b""
    assert stream.exit_status(HANG_S) == 137


# --- login shells -----------------------------------------------------------------------------------------------------

SHELLS = ["/bin/bash", "/bin/dash", "/usr/bin/fish", "/bin/tcsh", "/bin/zsh"]


@both_ways
@pytest.mark.parametrize("shell", SHELLS)
def test_constant_command_line_passes_every_login_shell_unchanged(shell: str, tmp_path: Path, way: str) -> None:
    program = base64.b64encode(b"import sys; print(sys.argv); print(sys.stdin.read())").decode()
    loader = 'exec python3 -S -c "import base64,sys; exec(base64.b64decode(sys.argv[1]))" "$0" "a  b"'
    with login_user(shell) as user, start_sshd(tmp_path, user=user) as server:
        transport = connect(server, way=way)
        stream = transport.open(f"/bin/sh -c '{loader}' {program}")
        stream.write("zürich\n".encode())
        stream.close_write()
        lines = read_all(stream).decode().splitlines()
        transport.close()
    assert lines[:2] == [f"['-c', '{program}', 'a  b']", "zürich"]


@pytest.mark.parametrize("shell", SHELLS)
def test_command_of_the_link_starts_python_under_every_login_shell(shell: str, tmp_path: Path) -> None:
    import zlib

    word = base64.b64encode(zlib.compress(b"print('started', len(sys.argv))")).decode()
    with login_user(shell) as user, start_sshd(tmp_path, user=user) as server:
        transport = connect(server)
        assert read_all(transport.open(build_command(word))) == b"started 2\n"
        transport.close()


@both_ways
def test_connection_that_breaks_raises_in_read_and_connects_again(tmp_path: Path, way: str) -> None:
    with start_sshd(tmp_path) as server:
        transport = connect(server, way=way)
        stream = transport.open("echo up; exec sleep 1000")
        assert stream.read(100) == b"up\n"
        hang_up(server)
        with pytest.raises(LostConnection, match="broke"):
            stream.read(100)
        transport.connect()
        assert read_all(transport.open("echo again")) == b"again\n"
        transport.close()


@both_ways
def test_host_that_goes_silent_is_noticed_within_the_bound(tmp_path: Path, way: str) -> None:
    with start_sshd(tmp_path) as server:
        transport = connect(server, way=way)
        link = Link.open(transport, root=str(tmp_path / "root"), ping_every_s=0.2, dead_after_s=1.5 * PATIENCE)
        assert link.call("ps").result("jobs") == []
        sessions = children(server.process.pid)
        for pid in [*sessions, *(child for parent in sessions for child in children(parent))]:
            os.kill(pid, signal.SIGSTOP)
        begun = time.monotonic()
        with pytest.raises(LostConnection, match=f"has not answered for {1.5 * PATIENCE:g} s"):
            link.call("ps").result("jobs")
        transport.close()
        assert time.monotonic() - begun < 25 * PATIENCE  # a client that is told nothing waits for 35 s
        hang_up(server)


# --- endpoints that run no commands -----------------------------------------------------------------------------------


@both_ways
def test_forced_command_is_seen_by_who_waits_for_an_answer(tmp_path: Path, way: str) -> None:
    relay = 'echo "Error: Your SSH client doesn\'t support PTY"; exit 1'
    with start_sshd(tmp_path, extra_config=f"ForceCommand {relay}") as server:
        transport = connect(server, way=way)
        stream = transport.open("anything")
        error = explain_no_answer(stream.stderr_text(), read_all(stream), stream.exit_status(HANG_S))
        transport.close()
    assert isinstance(error, HostError)
    assert "runs no commands" in error.message and "direct SSH address" in error.hint


class RelayServer(paramiko.ServerInterface):
    """Lets everybody in and opens sessions; paramiko's default is to refuse every exec."""

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        return paramiko.AUTH_SUCCESSFUL

    def get_allowed_auths(self, username: str) -> str:
        return "publickey"

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return paramiko.OPEN_SUCCEEDED


@pytest.fixture
def relay(tmp_path: Path, foreign_key: Path) -> Iterator[str]:
    """The client config of a server that is not OpenSSH and runs no commands."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            server = paramiko.Transport(listener.accept()[0])
            server.add_server_key(paramiko.Ed25519Key.from_private_key_file(str(foreign_key)))
            server.start_server(server=RelayServer())
            server.join()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        config = address_config(tmp_path, "127.0.0.1", listener.getsockname()[1])
        settings = f" IdentityFile {foreign_key}\n IdentityAgent none\n UserKnownHostsFile {tmp_path}/known\n"
        Path(config).write_text(Path(config).read_text() + settings)
        yield config
        thread.join(HANG_S)


@both_ways
def test_server_that_refuses_to_run_commands_is_named_a_relay(relay: str, way: str) -> None:
    transport = make_transport(ALIAS, config_file=relay, accept_new_host_key=True, way=way)
    transport.connect()
    with pytest.raises(HostError, match="runs no commands"):
        stream = transport.open("echo in")
        raise explain_no_answer(stream.stderr_text(), read_all(stream), stream.exit_status(HANG_S))
    transport.close()


@pytest.mark.parametrize(
    ("stderr", "noise", "status", "expected"),
    [
        ("", b"Error: Your SSH client doesn't support PTY\n", 1, "runs no commands"),
        ("", b"", None, "runs no commands"),
        ("This account is currently not available.\n", b"", 1, "may not log in"),
        ("", b"torchferry-no-python\n", 127, "no Python 3.8"),
        ("sh: /bin/sh: No such file or directory\n", b"", 127, "no /bin/sh"),
        ("", b'Please login as the user "ubuntu" rather than the user "root".\n', 142, "another user"),
        ("Your password has expired.\n", b"", 1, "expired"),
        ("", b"\x1b[31mhello\x1b[0m\x07\r\n", 3, "exit status 3"),
    ],
)
def test_explain_no_answer_names_the_reason(stderr: str, noise: bytes, status: int | None, expected: str) -> None:
    error: FerryError = explain_no_answer(stderr, noise, status)
    assert expected in error.message
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", error.message + " ".join(error.where))


@both_ways
def test_client_that_ends_with_open_streams_says_nothing(server: SshServer, way: str) -> None:
    code = (
        "import sys\nfrom deployer.connection.host import make_transport\n"
        "transport = make_transport(sys.argv[1], config_file=sys.argv[2], way=sys.argv[3])\ntransport.connect()\n"
        "stream = transport.open('echo up; exec cat')\nprint(stream.read(10))"
    )
    argv = [sys.executable, "-c", code, ALIAS, str(server.client_config_path), way]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=HANG_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, "b'up\\n'\n", "")


# --- imports ----------------------------------------------------------------------------------------------------------


def test_local_transport_and_addresses_load_no_ssh_library() -> None:
    code = (
        "import sys\nimport deployer.transport.ssh.target\nfrom deployer.connection.host import make_transport\n"
        "make_transport(None)\n"
        "print(sorted({'paramiko', 'fabric', 'cryptography'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_import_of_paramiko_waits_for_one_that_another_thread_is_at():
    code = (
        "import sys, threading\n"
        "from deployer.transport.ssh.paramiko_import import import_paramiko\n"
        "threading.Thread(target=import_paramiko).start()\n"
        "while 'paramiko' not in sys.modules: pass\n"
        "import_paramiko().SSHConfig\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_fabric_can_be_loaded_after_paramiko_was_loaded_without_invoke() -> None:
    code = (
        "import sys\nfrom deployer.transport.ssh.paramiko_import import import_paramiko\nimport_paramiko()\n"
        "assert 'invoke' not in sys.modules\nimport fabric\nprint(fabric.Connection('box').host)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "box\n"


def test_paramiko_knows_its_version_without_the_metadata_of_packages_which_can_be_loaded_after_it() -> None:
    code = (
        "import sys\nfrom deployer.transport.ssh.paramiko_import import import_paramiko\n"
        "version = import_paramiko().__version__\n"
        "assert not {'email', 'importlib.metadata'} & set(sys.modules)\nfrom importlib import metadata\n"
        "print(version == metadata.version('paramiko'), metadata.metadata('paramiko')['Name'])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "True paramiko\n"
