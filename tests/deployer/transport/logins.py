"""One real sshd with many kinds of logins: who comes from the address 127.0.1.N gets the Nth block of its config."""

from __future__ import annotations

import shutil
import socket
import struct
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from deployer.connection.host import make_transport
from deployer.connection.link import Link
from deployer.errors import FerryError
from tests.support.sshd import ALIAS, SshServer, login_user, start_sshd
from tests.support.ways import public


class Kind(NamedTuple):
    """One kind of server or login, and how it must end."""

    name: str
    code: int
    """The exit code; 0: the agent answers."""
    words: str = ""
    """A part of the error: its message, what the host said, its hint."""
    sshd: str = ""
    """Settings of the server, for this kind alone."""
    rc: str = ""
    """The ~/.bashrc there."""
    key: str = ""
    """Options before the key in authorized_keys."""
    client: Mapping[str, str] = MappingProxyType({})
    """Settings of the client, `{root}` filled in."""
    shell: str = ""
    """A login shell, for an account of its own."""
    account: tuple[str, ...] = ()
    """What is done to that account: a command whose last word is its name."""
    ssh_key: str = ""
    jump: bool = False
    """This kind is the jump host before a plain login."""
    says: bytes | None = None
    """No sshd, but a port that says this,"""
    stays: bool = False
    """and waits for the client to hang up, rather than doing so itself."""


@dataclass
class Logins:
    """The running server, and where each kind comes from."""

    server: SshServer
    root: Path
    kinds: Sequence[Kind]
    users: dict[str, str] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)
    """Of the kinds that are no sshd."""

    def config(self, kind: Kind, way: str) -> Path:
        """The client's ssh_config for a kind, by one way."""
        path = self.root / "clients" / f"{kind.name.replace(' ', '_')}_{way}"
        path.parent.mkdir(exist_ok=True)
        number = [other.name for other in self.kinds].index(kind.name) + 1
        settings = {
            "Hostname": "127.0.0.1",
            "Port": str(self.ports.get(kind.name, self.server.port)),
            "User": self.users.get(kind.name, self.server.user),
            "BindAddress": f"127.0.1.{number}",
            "IdentityFile": "{root}/id",
            "IdentitiesOnly": "yes",
            "IdentityAgent": "none",
            "UserKnownHostsFile": "{root}/known_hosts",
            "GlobalKnownHostsFile": "/dev/null",
            "ConnectTimeout": "5",
        }
        text = self._block("hop" if kind.jump else ALIAS, {**settings, **kind.client}, way)
        if kind.jump:
            text += self._block(
                ALIAS, {**settings, "BindAddress": "", "ProxyJump": "hop", "User": self.server.user}, way
            )
        path.write_text(text)
        return path

    def _block(self, host: str, settings: dict[str, str], way: str) -> str:
        lines = [f"    {name} {value.format(root=self.root, way=way)}\n" for name, value in settings.items() if value]
        return f"Host {host}\n" + "".join(lines)


@contextmanager
def many_logins(folder: Path, kinds: Sequence[Kind]) -> Iterator[Logins]:
    """The server for these kinds, with an account for each that has a shell of its own."""
    with ExitStack() as stack, tempfile.TemporaryDirectory(prefix="tf-logins-") as name:
        root = Path(name)
        root.chmod(0o755)
        users, blocks = {}, []
        for number, kind in enumerate(kinds, 1):
            home = root / f"home{number}"
            home.mkdir()
            (home / ".bashrc").write_text(kind.rc.format(root=root))
            if kind.shell:
                users[kind.name] = user = stack.enter_context(login_user(_shell(kind.shell, root)))
                if kind.account:
                    subprocess.run([*kind.account, user], check=True, capture_output=True)
            blocks.append(
                f"Match Address 127.0.1.{number}\n"
                + "".join(f" {line.format(root=root, home=home)}\n" for line in kind.sshd.splitlines())
                + f" SetEnv HOME={home}\n AuthorizedKeysFile {home}/authorized_keys\n"
            )
        ports = {kind.name: stack.enter_context(_saying(kind)) for kind in kinds if kind.says is not None}
        server = stack.enter_context(start_sshd(folder, extra_config="".join(blocks)))
        shutil.copy(server.known_hosts_path, root / "known_hosts")
        shutil.copy(server.key_path, root / "id")
        for number, kind in enumerate(kinds, 1):
            line = f"{kind.key} {public(server.key_path)}\n".lstrip()
            (root / f"home{number}" / "authorized_keys").write_text(line)
        yield Logins(server, root, kinds, users, ports)


@contextmanager
def _saying(kind: Kind) -> Iterator[int]:
    """The port of something that is no sshd."""

    def serve() -> None:
        with suppress(OSError):
            while True:
                peer = listener.accept()[0]
                threading.Thread(target=answer, args=(peer,), daemon=True).start()

    def answer(peer: socket.socket) -> None:
        with peer, suppress(OSError):
            peer.sendall(kind.says or b"")
            peer.recv(1)  # a port that is closed with something unread is reset
            while kind.stays and peer.recv(1 << 16):
                pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield int(listener.getsockname()[1])
        listener.shutdown(socket.SHUT_RDWR)


def key_exchange(**lists: str) -> bytes:
    """The first words of a server with these algorithms: its version, and SSH_MSG_KEXINIT (RFC 4253, 7.1)."""
    usual = {
        "kex": "ecdh-sha2-nistp256",
        "host_key": "ssh-ed25519",
        "cipher": "aes128-ctr",
        "mac": "hmac-sha2-256",
    }
    kex, host_key, cipher, mac = {**usual, **lists}.values()
    names = [kex, host_key, cipher, cipher, mac, mac, "none", "none", "", ""]
    body = b"\x14" + bytes(16) + b"".join(struct.pack(">I", len(name)) + name.encode() for name in names) + bytes(5)
    padding = 8 - (len(body) + 5) % 8 + 8
    return b"SSH-2.0-Odd\r\n" + struct.pack(">IB", len(body) + padding + 1, padding) + body + bytes(padding)


def _shell(shell: str, root: Path) -> str:
    """The path of a login shell; a text that is none becomes a program."""
    if "\n" not in shell:
        return shell
    path = root / f"shell{len(list(root.glob('shell*')))}"
    path.write_text(shell)
    path.chmod(0o755)
    return str(path)


class Told(NamedTuple):
    """What a user is told."""

    code: int
    message: str = ""
    where: tuple[str, ...] = ()
    hint: str = ""


def ask_agent(config: Path, way: str, root: Path, *, ssh_key: str | None = None, **bounds: float) -> Told:
    """How a command ends that asks the host for its jobs."""
    transport = make_transport(ALIAS, config_file=str(config), way=way, ssh_key=ssh_key)
    try:
        with Link.open(transport, root=str(root), request={"op": "ps"}, **bounds) as link:
            link.first.result()
            return Told(0)
    except FerryError as error:
        return Told(error.exit_code, error.message, error.where, error.hint)
    finally:
        transport.close()
