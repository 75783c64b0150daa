"""Reaching a host: jumps, ports, time limits, crowded servers, over both transports."""

from __future__ import annotations

import socket
import sys
import threading
import time
from pathlib import Path

from deployer.transport import make_transport
from tests.sshd import ALIAS, SshServer, free_port, start_sshd
from tests.ways import (
    address_config,
    both_ways,
    jump_config,
    read_all,
    refusal,
    with_config,
)

# --- jumps ------------------------------------------------------------------------------------------------------------


@both_ways
def test_jump_host_carries_the_connection(server: SshServer, hop: SshServer, tmp_path: Path, way: str) -> None:
    transport = make_transport(ALIAS, config_file=jump_config(server, hop, tmp_path), way=way)
    transport.connect()
    came_from = read_all(transport.open("echo $SSH_CONNECTION; cat /proc/$PPID/cmdline >/dev/null")).split()
    transport.close()
    assert int(came_from[3]) == server.port
    assert "Accepted publickey" in hop.log_path.read_text()


@both_ways
def test_jump_host_that_refuses_our_key_is_named(server: SshServer, hop: SshServer, tmp_path: Path, way: str) -> None:
    config = jump_config(server, hop, tmp_path)
    text = Path(config).read_text().replace(f"IdentityFile {hop.key_path}", f"IdentityFile {server.key_path}")
    Path(config).write_text(text)
    error = refusal(config, way=way)
    assert "jump host" in error.message and str(hop.port) in error.message


@both_ways
def test_jump_host_with_an_unknown_key_is_refused(server: SshServer, hop: SshServer, tmp_path: Path, way: str) -> None:
    config = jump_config(server, hop, tmp_path)
    Path(config).write_text(Path(config).read_text().replace(str(hop.known_hosts_path), str(server.known_hosts_path)))
    error = refusal(config, way=way)
    assert "jump host" in error.message and f"[127.0.0.1]:{hop.port} is not known" in error.message


@both_ways
def test_target_that_the_jump_host_cannot_reach_is_named(
    server: SshServer, hop: SshServer, tmp_path: Path, way: str
) -> None:
    port = free_port()
    error = refusal(jump_config(server, hop, tmp_path, Port=str(port)), way=way)
    assert f"127.0.0.1:{port}" in error.message and "cannot reach" in error.message


@both_ways
def test_proxy_command_carries_the_connection(server: SshServer, tmp_path: Path, way: str) -> None:
    relay = "import socket,sys,threading,shutil\ns=socket.create_connection((sys.argv[1],int(sys.argv[2])))\n" + (
        "def up():\n while d:=__import__('os').read(0,65536): s.sendall(d)\n"
        "threading.Thread(target=up,daemon=True).start()\n"
        "while d:=s.recv(65536): __import__('os').write(1,d)\n"
    )
    (tmp_path / "relay.py").write_text(relay)
    command = f"{sys.executable} '{tmp_path}/relay.py' %h %p"
    transport = make_transport(ALIAS, config_file=with_config(server, tmp_path, ProxyCommand=command), way=way)
    transport.connect()
    assert read_all(transport.open("echo through")) == b"through\n"
    transport.close()


# --- no connection ----------------------------------------------------------------------------------------------------


@both_ways
def test_closed_port_is_a_clear_error(tmp_path: Path, way: str) -> None:
    port = free_port()
    error = refusal(address_config(tmp_path, "127.0.0.1", port), way=way)
    assert error.message == f"127.0.0.1:{port} refuses connections"


@both_ways
def test_unresolvable_host_name_is_a_clear_error(tmp_path: Path, way: str) -> None:
    assert "cannot be resolved" in refusal(address_config(tmp_path, "no-such-host.invalid", 22), way=way).message


@both_ways
def test_silent_port_ends_by_the_connect_timeout(tmp_path: Path, way: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        begun = time.monotonic()
        error = refusal(address_config(tmp_path, "127.0.0.1", listener.getsockname()[1]), way=way)
    assert "no SSH handshake came within 1 s" in error.message
    assert time.monotonic() - begun < 5


def serve_once(said: bytes) -> tuple[socket.socket, threading.Thread]:
    """A port that says something to whoever comes, and hangs up."""
    listener = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:
                return
            peer.sendall(said)
            peer.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return listener, thread


@both_ways
def test_port_that_speaks_something_else_is_named_so(tmp_path: Path, way: str) -> None:
    listener, _ = serve_once(b"HTTP/1.1 400 Bad Request\r\n" * 101)
    error = refusal(address_config(tmp_path, "127.0.0.1", listener.getsockname()[1]), way=way)
    listener.close()
    assert "does not speak SSH" in error.message


def test_connections_dropped_at_random_are_tried_again(tmp_path: Path) -> None:
    with start_sshd(tmp_path, max_startups="2:70:4") as server:
        transports = [make_transport(ALIAS, config_file=str(server.client_config_path)) for _ in range(8)]
        for transport in transports:
            transport.connect()
        assert [read_all(transport.open("echo in")) for transport in transports] == [b"in\n"] * 8
        for transport in transports:
            transport.close()
