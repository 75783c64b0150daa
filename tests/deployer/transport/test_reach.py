"""Reaching a host: jumps, ports, time limits, crowded servers, over both transports."""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deployer.connection.host import make_transport
from deployer.errors import ConnectError
from deployer.transport.protocol import Transport
from tests.support.limits import FOREVER_S, PATIENCE, patient
from tests.support.sshd import ALIAS, SshServer, free_port, login_user, start_sshd
from tests.support.ways import address_config, both_ways, jump_config, read_all, refusal, relay_command, with_config

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


@pytest.fixture(scope="module")
def far_hop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServer]:
    """A jump host where somebody else logs in."""
    with login_user("/bin/sh") as user, start_sshd(tmp_path_factory.mktemp("far"), user=user) as running:
        yield running


def chain_config(servers: dict[str, SshServer], folder: Path, keys: dict[str, Path] | None = None) -> str:
    """A config in which `box` is reached through the others, in their order; `keys`: others than their own."""
    blocks = []
    for name, server in servers.items():
        key = (keys or {}).get(name, server.key_path)
        block = server.client_config_path.read_text().replace(f"Host {ALIAS} 127.0.0.1", f"Host {name}")
        blocks.append(block.replace(f"IdentityFile {server.key_path}", f"IdentityFile {key}"))
    hops = ",".join(name for name in servers if name != ALIAS)
    config = folder / "client_config"
    config.write_text("".join(blocks) + f"Host {ALIAS}\n    ProxyJump {hops}\n")
    return str(config)


@both_ways
def test_chain_of_jump_hosts_with_users_and_ports_of_their_own_carries_the_connection(
    server: SshServer, hop: SshServer, far_hop: SshServer, tmp_path: Path, way: str
) -> None:
    config = chain_config({"far": far_hop, "near": hop, ALIAS: server}, tmp_path)
    transport = make_transport(ALIAS, config_file=config, way=way)
    transport.connect()
    assert read_all(transport.open("echo in")) == b"in\n"
    transport.close()
    assert f"Accepted publickey for {far_hop.user}" in far_hop.log_path.read_text()


@both_ways
@pytest.mark.parametrize("name", ["far", "near", ALIAS])
def test_link_of_a_chain_that_lets_us_not_in_is_named_and_sees_no_key_but_its_own(
    server: SshServer, hop: SshServer, far_hop: SshServer, foreign_key: Path, tmp_path: Path, way: str, name: str
) -> None:
    servers = {"far": far_hop, "near": hop, ALIAS: server}
    error = refusal(chain_config(servers, tmp_path, {name: foreign_key}), way=way)
    assert f"{servers[name].user}@127.0.0.1:{servers[name].port}" in error.message
    assert ("jump host" in error.message) is (name != ALIAS)


@both_ways
def test_key_named_for_the_target_is_not_tried_on_the_jump_host(
    server: SshServer, hop: SshServer, foreign_key: Path, tmp_path: Path, way: str
) -> None:
    config = chain_config({"near": hop, ALIAS: server}, tmp_path, {"near": foreign_key})
    before = hop.log_path.read_text().count("Failed publickey")
    error = refusal(config, way=way, ssh_key=str(server.key_path))
    assert f"127.0.0.1:{hop.port}" in error.message and "jump host" in error.message
    assert hop.log_path.read_text().count("Failed publickey") - before <= 1


@both_ways
def test_target_that_the_jump_host_cannot_reach_is_named(
    server: SshServer, hop: SshServer, tmp_path: Path, way: str
) -> None:
    port = free_port()
    error = refusal(jump_config(server, hop, tmp_path, Port=str(port)), way=way)
    assert f"127.0.0.1:{port}" in error.message and "cannot reach" in error.message


@both_ways
def test_proxy_command_carries_the_connection(server: SshServer, tmp_path: Path, way: str) -> None:
    command = relay_command(tmp_path)
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
    assert f"no SSH handshake came within {patient(1)} s" in error.message
    assert time.monotonic() - begun < 9 * PATIENCE  # 10 s are the usual limit


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


@pytest.fixture
def black_hole() -> Iterator[int]:
    """A loopback port that drops what wants to connect: its queue is full."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address = listener.getsockname()
        queued = [socket.socket() for _ in range(4)]
        for sock in queued:
            sock.setblocking(False)
            sock.connect_ex(address)
        yield address[1]
        for sock in queued:
            sock.close()


@both_ways
def test_address_that_drops_packets_ends_by_the_connect_timeout(tmp_path: Path, way: str, black_hole: int) -> None:
    config = address_config(tmp_path, "127.0.0.1", black_hole, ConnectTimeout=str(FOREVER_S))
    begun = time.monotonic()
    error = refusal(config, way=way, connect_timeout_s=PATIENCE)
    assert error.message == f"127.0.0.1:{black_hole} did not answer within {PATIENCE:g} s"
    assert time.monotonic() - begun < 60 * PATIENCE


@both_ways
def test_server_that_stalls_in_the_login_ends_by_the_connect_timeout(tmp_path: Path, way: str) -> None:
    stall = "AuthorizedKeysFile none\nAuthorizedKeysCommand /bin/sleep 60\nAuthorizedKeysCommandUser root"
    with start_sshd(tmp_path, first_config=stall) as server:
        begun = time.monotonic()
        error = refusal(str(server.client_config_path), way=way, connect_timeout_s=1.5 * PATIENCE)
        assert time.monotonic() - begun < 9 * PATIENCE  # 10 s are the usual limit
    assert f"did not finish the login within {1.5 * PATIENCE:g} s" in error.message


@both_ways
def test_twelve_connections_at_once_to_a_crowded_server_all_come_through(tmp_path: Path, way: str) -> None:
    with start_sshd(tmp_path, max_startups="3:50:5", max_sessions=2) as server:
        config = str(server.client_config_path)
        transports = [make_transport(ALIAS, config_file=config, way=way) for _ in range(12)]

        def use(transport: Transport) -> bytes:
            transport.connect()
            answer = read_all(transport.open("echo in"))
            transport.close()
            return answer

        with ThreadPoolExecutor(12) as pool:
            assert list(pool.map(use, transports)) == [b"in\n"] * 12
        assert "drop connection" in server.log_path.read_text()


@both_ways
def test_session_beyond_what_the_server_allows_is_a_clear_error(tmp_path: Path, way: str) -> None:
    with start_sshd(tmp_path, max_sessions=1) as server:
        transport = make_transport(ALIAS, config_file=str(server.client_config_path), way=way)
        transport.connect()
        first = transport.open("cat")
        with pytest.raises(ConnectError, match="opens no session"):
            transport.open("cat")
        first.close_write()
        assert read_all(first) == b""
        transport.close()


# --- IPv6 -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server6(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServer]:
    if not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    with start_sshd(tmp_path_factory.mktemp("ssh6"), address="::1") as running:
        yield running


@both_ways
@pytest.mark.parametrize("spelling", ["[::1]:{port}", "{user}@[::1]:{port}", "ssh://[::1]:{port}", "::1", "{user}@::1"])
def test_ipv6_address_in_any_spelling_is_reached(server6: SshServer, spelling: str, way: str) -> None:
    address = spelling.format(user=server6.user, port=server6.port)
    transport = make_transport(address, config_file=str(server6.client_config_path), way=way)
    transport.connect()
    assert read_all(transport.open("echo in")) == b"in\n"
    assert transport.description == f"{server6.user}@[::1]:{server6.port}"
    transport.close()


@both_ways
def test_link_local_address_with_its_interface_is_reached(tmp_path: Path, way: str) -> None:
    lines = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
    found = [(line[0], line[5]) for line in lines if line[3] == "20"]
    if not found:
        pytest.skip("no interface here has a link-local address")
    address = f"{ipaddress.IPv6Address(bytes.fromhex(found[0][0]))}%{found[0][1]}"
    with start_sshd(tmp_path, address=address) as server:
        config = server.client_config_path
        config.write_text(config.read_text().replace(f"Hostname {address}", f"Hostname {address.replace('%', '%%')}"))
        transport = make_transport(f"[{address}]:{server.port}", config_file=str(server.client_config_path), way=way)
        transport.connect()
        assert read_all(transport.open("echo in")) == b"in\n"
        transport.close()
