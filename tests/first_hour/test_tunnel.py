"""`tunnel`: ports of a host from here, over a server that forbids port forwarding."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import signal
import socket
import socketserver
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from deployer.commands.values import parse_ports
from deployer.errors import HostError, LostConnection, UsageError
from deployer.forward.tunnel import EACH_LINK, Tunnel, _Links
from tests.support.ferry import Ferry
from tests.support.limits import HANG_S
from tests.support.sshd import SshServer, free_port, start_sshd

MB_10 = random.Random(1).randbytes(10 << 20)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServer]:
    with start_sshd(tmp_path_factory.mktemp("ssh"), first_config="AllowTcpForwarding no") as running:
        yield running


class _Turned(socketserver.StreamRequestHandler):
    """Reads to the end, then gives all of it back the other way round. `flood` is given bytes for ever."""

    def handle(self) -> None:
        data = self.rfile.read(5)
        if data == b"flood":
            try:
                while True:
                    self.wfile.write(bytes(1 << 20))
            except OSError:
                return
        self.wfile.write((data + self.rfile.read())[::-1])


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True


@contextmanager
def serving(port: int = 0) -> Iterator[int]:
    """A program on the host, which is this machine."""
    with _Server(("127.0.0.1", port), _Turned) as there:
        threading.Thread(target=there.serve_forever, daemon=True).start()
        yield there.server_address[1]
        there.shutdown()


@contextmanager
def tunnel(ferry: Ferry, *words: str) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """A tunnel that is up, and its port here; Ctrl-C ends it well."""
    client = ferry.start("tunnel", *ferry.where(), *words, "--json")
    try:
        line = client.stdout.readline()
        assert line, client.communicate()[1].decode()
        yield json.loads(line)["local"], client
        client.send_signal(signal.SIGINT)
        assert client.wait(HANG_S) == 0
    finally:
        client.kill()
        client.communicate()


def ask(port: int, data: bytes) -> bytes:
    """Sends all, says that this is the end, reads to the end."""
    with socket.create_connection(("127.0.0.1", port), timeout=HANG_S) as here:
        sending = threading.Thread(target=lambda: (here.sendall(data), here.shutdown(socket.SHUT_WR)))
        sending.start()
        with here.makefile("rb") as answer:
            said = answer.read()
        sending.join()
        return said


@pytest.mark.parametrize("way", ["fabric", "openssh"])
def test_many_large_connections_at_once_beside_one_that_is_not_read(remote, way):
    remote.transport = way
    with serving() as port, tunnel(remote, f"0:{port}") as (local, _):
        with socket.create_connection(("127.0.0.1", local)) as slow:
            slow.sendall(b"flood")  # and never reads
            with ThreadPoolExecutor(30) as pool:
                answers = list(pool.map(lambda n: ask(local, b"%d" % n * 1000), range(30)))
            assert answers == [(b"%d" % n * 1000)[::-1] for n in range(30)]
            assert hashlib.sha256(ask(local, MB_10)).digest() == hashlib.sha256(MB_10[::-1]).digest()


def test_program_that_comes_later_and_a_connection_that_is_cut(remote, server):
    port = free_port()
    remote.run("run", *remote.where(), "--no-pull", "--name", "served", "--", "true")
    with tunnel(remote, "served", f"0:{port}") as (local, client):
        assert b"has ended: succeeded" in client.stderr.readline()
        with suppress(ConnectionResetError):  # as from a port on which nobody listens
            assert ask(local, b"early") == b""
        assert b"nothing listens on port %d there" % port in client.stderr.readline()
        with serving(port):
            assert ask(local, b"12345") == b"54321"
            with socket.create_connection(("127.0.0.1", local), timeout=HANG_S) as open_one:
                open_one.sendall(b"12")
                for pid in _sessions(server):
                    os.kill(pid, signal.SIGKILL)
                with suppress(ConnectionResetError):
                    assert open_one.recv(1) == b""
            assert ask(local, b"again!") == b"!niaga"
        said = client.stderr.readline() + client.stderr.readline()
        assert b"trying again" in said and b"connected again" in said


def _sessions(server: SshServer) -> list[int]:
    pid = server.process.pid
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class _Conversation:
    """Stands for a link: what is asked of one here is to be there, and to be closed."""

    loss = None
    is_closed = False

    def wait_ready(self) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True


class _SlowHost:
    """Its logins last until they are let."""

    def __init__(self) -> None:
        self.made: list[_Conversation] = []
        self.asked, self.lets = threading.Semaphore(0), threading.Event()

    def connect(self) -> _Conversation:
        self.asked.release()
        assert self.lets.wait(HANG_S)
        self.made.append(_Conversation())
        return self.made[-1]


def test_nobody_but_new_connections_waits_for_a_login():
    host, first = _SlowHost(), _Conversation()
    links = _Links(host, first)
    assert [links.borrow() for _ in range(EACH_LINK)] == [first] * EACH_LINK
    with ThreadPoolExecutor(4) as pool:
        late = [pool.submit(links.borrow)]
        assert host.asked.acquire(timeout=HANG_S)
        late.append(pool.submit(links.borrow))
        links.give_back(first)  # waits for nothing
        assert not host.made and not late[1].done()
        host.lets.set()
        assert late[0].result(HANG_S) is host.made[0] and late[1].result(HANG_S) is first
        assert links.borrow() is host.made[0] and len(host.made) == 1
        links.give_back(host.made[0])
        links.give_back(host.made[0])
        assert host.made[0].is_closed and not first.is_closed
        host.lets.clear()
        gone = pool.submit(links.borrow)
        assert host.asked.acquire(timeout=HANG_S)
        links.close()
        host.lets.set()
        with pytest.raises(LostConnection, match="closed"):
            gone.result(HANG_S)
    assert first.is_closed and host.made[1].is_closed


def test_connection_over_which_the_port_is_not_found_again_is_closed():
    host = _SlowHost()
    host.lets.set()

    def again(link: _Conversation) -> int:
        raise HostError("TensorBoard ended")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        through = Tunnel(host, _Conversation(), listener, 80, tell=print, again=again)
        with pytest.raises(HostError):
            through._connect()
        through.close()
    assert [link.is_closed for link in host.made] == [True]


def test_ports_that_cannot_be_had(remote, ferry):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = remote.run("tunnel", *remote.where(), f"{port}:80")
        assert done.returncode == 2 and f"port {port} of this machine is taken" in done.stderr.decode()
        free = re.search(r"deploy\.py tunnel --ssh box (\d+):80", done.stderr.decode())
        assert free and int(free[1]) != port
        here = ferry.run("tunnel", "--remote-root", str(ferry.root), str(port))
        assert here.returncode == 2 and b"one of this machine already" in here.stderr
    assert b"which port?" in remote.run("tunnel", "some-job").stderr


def test_local_host_may_be_given_a_second_port(ferry):
    with serving() as port, tunnel(ferry, f"0:{port}") as (local, _):
        assert (ask(local, b"12345"), local != port) == (b"54321", True)


@pytest.mark.parametrize(
    ("text", "ports"),
    [("8888", (8888, 8888)), ("9000:8888", (9000, 8888)), ("0:80", (0, 80)), ("65535", (65535, 65535))],
)
def test_ports_as_they_are_typed(text, ports):
    assert parse_ports(text) == ports


@pytest.mark.parametrize("text", ["", "0", "x", "80:", ":80", "80:0", "65536", "70000:80", "-1", "80:80:80", "８０"])
def test_what_is_no_port(text):
    with pytest.raises(UsageError):
        parse_ports(text)
