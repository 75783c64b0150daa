"""A real OpenSSH server on a loopback port, for tests: its own host key, its own config, nothing of the user's touched.

    with start_sshd(tmp_path) as server:
        transport = make_transport(server.address, config_file=str(server.client_config_path))

Login shells come from the system's accounts, so `login_user("/usr/bin/fish")` makes a real account and needs root.
"""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.limits import HANG_S

SSHD = shutil.which("sshd", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin:/usr/libexec")
ALIAS = "box"


@dataclass
class SshServer:
    """A running server. `client_config_path` has the alias `box` for it, with key, port and known_hosts."""

    host: str
    port: int
    user: str
    key_path: Path
    host_key_path: Path
    known_hosts_path: Path
    home: Path
    client_config_path: Path
    log_path: Path
    process: subprocess.Popen[bytes]

    @property
    def address(self) -> str:
        return f"{self.user}@{self.host}:{self.port}"

    @property
    def host_name(self) -> str:
        """The server's name in known_hosts files."""
        return f"[{self.host}]:{self.port}"

    def host_key_line(self, name: str | None = None) -> str:
        """The line that makes the server known."""
        kind, blob = self.host_key_path.with_suffix(".pub").read_text().split()[:2]
        return f"{name or self.host_name} {kind} {blob}\n"

    def stop(self) -> None:
        """Ends the server and the sessions that it has open."""
        pid = self.process.pid
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            _kill(int(child))
        self.process.terminate()
        self.process.wait(HANG_S)
        if self.home.parent.name.startswith("tf-sshd-"):
            shutil.rmtree(self.home.parent, ignore_errors=True)

    def __enter__(self) -> SshServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


def start_sshd(
    folder: Path,
    *,
    user: str | None = None,
    extra_config: str = "",
    first_config: str = "",
    key_type: str = "ed25519",
    name: str = "sshd",
    address: str = "127.0.0.1",
    run_by: Sequence[str] = (),
    max_startups: str = "100:30:200",
    max_sessions: int = 100,
) -> SshServer:
    """A server below `folder`, listening when this returns. Skips where there is no sshd, fails in CI.

    `user` is who its client config logs in as (default: us); others than us need root. `first_config` comes before our
    own settings, and for sshd the first value counts. `run_by` comes before the command, such as `ip netns exec NAME`,
    where `address` is to listen on.
    """
    if SSHD is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("no sshd: apt-get install openssh-server")
    root = folder / name if user is None else Path(tempfile.mkdtemp(prefix="tf-sshd-"))  # pytest's folders are 0700
    home = root / "home"
    home.mkdir(parents=True)
    if user is not None:
        root.chmod(0o755)
        shutil.chown(home, user)
    host_key = make_key(root / "host_key", key_type)
    key = make_key(root / "id", "ed25519")
    shutil.copy(f"{key}.pub", root / "authorized_keys")
    port = free_port()
    config = root / "sshd_config"
    config.write_text(
        f"{first_config}\n"
        + _SERVER.format(
            address=address,
            port=port,
            root=root,
            home=home,
            max_startups=max_startups,
            max_sessions=max_sessions,
        )
        + extra_config
        + "\n"
    )
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    log = root / "log"
    process = subprocess.Popen([*run_by, SSHD, "-D", "-f", str(config), "-E", str(log)], stdin=subprocess.DEVNULL)
    server = SshServer(
        host=address,
        port=port,
        user=user or pwd.getpwuid(os.getuid()).pw_name,
        key_path=key,
        host_key_path=host_key,
        known_hosts_path=root / "known_hosts",
        home=home,
        client_config_path=root / "client_config",
        log_path=log,
        process=process,
    )
    server.known_hosts_path.write_text(server.host_key_line())
    server.client_config_path.write_text(
        _CLIENT.format(alias=ALIAS, address=address, root=root, port=port, user=server.user)
    )
    _wait_listening(server)
    return server


_SERVER = """\
Port {port}
ListenAddress {address}
HostKey {root}/host_key
AuthorizedKeysFile {root}/authorized_keys
PidFile none
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
StrictModes no
Subsystem sftp internal-sftp
MaxStartups {max_startups}
MaxSessions {max_sessions}
UseDNS no
SetEnv HOME={home}
"""

_CLIENT = """\
Host {alias} {address}
    Hostname {address}
    Port {port}
    User {user}
    IdentityFile {root}/id
    IdentitiesOnly yes
    IdentityAgent none
    UserKnownHostsFile {root}/known_hosts
    GlobalKnownHostsFile /dev/null
"""


def make_key(path: Path, kind: str = "ed25519", *, passphrase: str = "") -> Path:
    """A new private key, and PATH.pub beside it."""
    subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", passphrase, "-f", str(path)], check=True)
    return path


def free_port() -> int:
    """A loopback port on which nobody listens just now."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


@contextmanager
def login_user(shell: str) -> Iterator[str]:
    """The name of a new account with this login shell, removed afterwards. Skips without root or the shell."""
    if os.getuid() != 0:
        pytest.skip("making an account with a login shell of its own needs root")
    if shutil.which(shell) is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"no {shell} here: apt-get install {Path(shell).name}")
    name = f"tf_{Path(shell).name}_{secrets.token_hex(4)}"
    subprocess.run(["useradd", "-M", "-d", "/nonexistent", "-s", shell, name], check=True, capture_output=True)
    try:
        # without a password the account is locked, and sshd without PAM lets no locked account in
        subprocess.run(["usermod", "-p", "*", name], check=True)
        yield name
    finally:
        subprocess.run(["userdel", "--force", name], check=False, capture_output=True)


def _wait_listening(server: SshServer) -> None:
    deadline = time.monotonic() + HANG_S
    said = ""
    while time.monotonic() < deadline and server.process.poll() is None:
        said = server.log_path.read_text() if server.log_path.exists() else ""
        if "Server listening" in said:
            return
        time.sleep(0.01)
    server.process.kill()
    raise RuntimeError(f"sshd did not start: {said}")


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        pass
