"""What tests of the transports share: connecting to a test's sshd by either way, refusals, a person at a terminal."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from deployer.connection.host import make_transport
from deployer.errors import ConnectError
from deployer.transport.protocol import Stream, Transport
from tests.support.limits import HANG_S, patient
from tests.support.sshd import ALIAS, SshServer

both_ways = pytest.mark.parametrize("way", ["fabric", "openssh"])


def connect(server: SshServer, config: str = "", **options: Any) -> Transport:
    """A connected transport, by the server's own client config unless another one is given."""
    transport = make_transport(
        ALIAS, **{"config_file": config or str(server.client_config_path), "way": "fabric", **options}
    )
    transport.connect()
    return transport


def with_config(server: SshServer, folder: Path, **changes: str) -> str:
    """The server's client config with some keywords set to something else."""
    lines = server.client_config_path.read_text().splitlines()
    kept = [line for line in lines if not line.split() or line.split()[0] not in changes]
    kept += [f"    {keyword} {value}" for keyword, value in changes.items()]
    path = folder / "client_config"
    path.write_text("\n".join(kept) + "\n")
    return str(path)


def refusal(config: str, address: str = ALIAS, **options: Any) -> ConnectError:
    """The error of a connection that must not succeed."""
    with pytest.raises(ConnectError) as caught:
        make_transport(address, **{"config_file": config, "way": "fabric", **options}).connect()
    return caught.value


def read_all(stream: Stream) -> bytes:
    parts = []
    while data := stream.read(1 << 16):
        parts.append(data)
    return b"".join(parts)


def hang_up(server: SshServer) -> None:
    """Ends the server's sessions, not the server."""
    for child in children(server.process.pid):
        os.kill(child, signal.SIGKILL)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def address_config(folder: Path, host: str, port: int, **settings: str) -> str:
    path = folder / "client_config"
    settings = {"Hostname": host, "Port": str(port), "ConnectTimeout": str(patient(1)), **settings}
    path.write_text(f"Host {ALIAS}\n" + "".join(f" {name} {value}\n" for name, value in settings.items()))
    return str(path)


def public(path: Path) -> str:
    return " ".join(Path(f"{path}.pub").read_text().split()[:2])


def known_hosts_config(server: SshServer, folder: Path, lines: str) -> tuple[str, Path]:
    path = folder / "known"
    path.write_text(lines)
    return with_config(server, folder, UserKnownHostsFile=str(path)), path


def authorise(server: SshServer, key: Path) -> None:
    with (server.key_path.parent / "authorized_keys").open("a") as file:
        file.write(Path(f"{key}.pub").read_text())


def jump_config(server: SshServer, hop: SshServer, folder: Path, **changes: str) -> str:
    config = with_config(server, folder, ProxyJump="hop", **changes)
    hop_config = hop.client_config_path.read_text().replace(f"Host {ALIAS} 127.0.0.1", "Host hop")
    with Path(config).open("a") as file:
        file.write(hop_config)
    Path(config).write_text(Path(config).read_text().replace(f"Host {ALIAS} 127.0.0.1", f"Host {ALIAS}"))
    return config


def relay_command(folder: Path) -> str:
    """A ProxyCommand that connects its stdin and stdout with the server."""
    (folder / "relay.py").write_text(_RELAY)
    return f"{sys.executable} '{folder}/relay.py' %h %p"


_RELAY = """
import os, socket, sys, threading
peer = socket.create_connection((sys.argv[1], int(sys.argv[2])))
def up():
    while data := os.read(0, 65536):
        peer.sendall(data)
threading.Thread(target=up, daemon=True).start()
while data := peer.recv(65536):
    os.write(1, data)
"""

_CLIENT = """
import sys
from deployer.errors import FerryError
from deployer.connection.host import make_transport
try:
    transport = make_transport(sys.argv[1], config_file=sys.argv[2], way=sys.argv[3])
    transport.connect()
    stream = transport.open("echo in; exec cat >/dev/null")
    print("GOT", stream.read(100), flush=True)
    transport.close()
except FerryError as error:
    print("REFUSED", error.message, flush=True)
"""


def at_terminal(config: str, answers: dict[str, str], *, way: str = "fabric", program: str = _CLIENT) -> str:
    """What a person sees who connects at a terminal and answers each prompt that contains a key of `answers`.

    After two seconds of silence the answer is typed again: a terminal drops what comes while it changes its mode.
    """
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", program, ALIAS, config, way])
    seen, asked, typed = b"", 0, b""
    deadline = time.monotonic() + HANG_S
    while time.monotonic() < deadline:
        if not select.select([terminal], [], [], 2)[0]:
            os.write(terminal, typed)
            continue
        try:
            data = os.read(terminal, 4096)
        except OSError:  # the other end is closed
            break
        seen += data
        for prompt, answer in answers.items():
            position = seen.find(prompt.encode(), asked)
            if position >= 0:
                asked = len(seen)
                typed = answer.encode() + b"\n"
                os.write(terminal, typed)
    os.close(terminal)
    os.waitpid(pid, 0)
    return seen.decode()


def add_to_agent(agent: Path, key: Path) -> None:
    environment = {**os.environ, "SSH_AUTH_SOCK": str(agent)}
    subprocess.run(["ssh-add", "-q", str(key)], check=True, env=environment)
