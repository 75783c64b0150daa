"""Chooses how to connect to a host: paramiko, or the ssh program if the host's options need it."""

from __future__ import annotations

import os
import shutil
import socket
import struct
import subprocess
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from deployer.errors import UsageError
from deployer.printable import shown
from deployer.terminal import notice
from deployer.transport.protocol import Limits, Stream
from deployer.transport.ssh.attempt import Attempt
from deployer.transport.ssh.config_file import chosen_config
from deployer.transport.ssh.explain import NoCommonAlgorithm
from deployer.transport.ssh.known_hosts import host_name_in_files, read_known_keys
from deployer.transport.ssh.ssh_config import SshOptions, resolve

if TYPE_CHECKING:
    from deployer.transport.paramiko_ssh.connection import FabricTransport
    from deployer.transport.ssh.target import Target
    from deployer.transport.ssh_program.connection import OpenSSHTransport

AGENT_TIMEOUT_S = 1.0
_announced: set[str] = set()


class SshTransport:
    """A connection to one SSH host by `auto`, `fabric` or `openssh`; it starts in the background, `connect` waits for
    it."""

    def __init__(
        self,
        target: Target,
        *,
        way: str = "auto",
        ssh_key: str | None = None,
        accept_new_host_key: bool = False,
        config_file: str | None = None,
        connect_timeout_s: float | None = None,
    ) -> None:
        self._reason = ""
        self._target = target
        self._way = way
        self._ssh_key = ssh_key or target.key
        self._accept_new = accept_new_host_key
        self._config_file = target.config or chosen_config(config_file)
        self._connect_timeout_s = connect_timeout_s
        self._limits = Limits()
        self._chosen: FabricTransport | OpenSSHTransport | None = None
        self._attempt: Attempt | None = None
        self._way_known = threading.Event()
        self._lock = threading.Lock()

    @property
    def description(self) -> str:
        return self._chosen.description if self._chosen is not None else self._target.address

    @property
    def limits(self) -> Limits:
        return self._limits

    def start_connect(self) -> None:
        """Begins to connect unless connected; `connect` raises the errors."""
        if self._chosen is not None:
            self._chosen.start_connect()
        elif self._attempt is None:
            self._attempt = Attempt(lambda _: self._settle())

    def load(self) -> None:
        """Loads the modules that connecting needs, or waits until they are loaded, if this host needs them. Call it
        from a thread whose work can wait: two threads that load modules block each other, and the connection waits for
        these modules."""
        self._way_known.wait()
        from deployer.transport.paramiko_ssh.connection import FabricTransport, import_dial

        if isinstance(self._chosen, FabricTransport):
            import_dial()

    def connect(self) -> None:
        """Connects, also again if the connection was lost."""
        with self._lock:
            chosen = self._decide()
            self._announce()
            try:
                chosen.connect()
            except NoCommonAlgorithm as error:
                self._fall_back(error).connect()

    def _announce(self) -> None:
        if self._reason not in ("", *_announced):
            _announced.add(self._reason)
            notice(shown(f"{self.description}: connecting with the ssh program: {self._reason}"))

    def _fall_back(self, error: NoCommonAlgorithm) -> OpenSSHTransport:
        """Changes to the ssh program, which may have an algorithm that paramiko lacks. Raises the error if that is not
        possible."""
        from deployer.transport.paramiko_ssh.connection import FabricTransport

        if self._way != "auto" or not isinstance(self._chosen, FabricTransport):
            raise error
        if shutil.which("ssh") is None:
            words = "there is no ssh program here, which may have one: install the OpenSSH client"
            raise NoCommonAlgorithm(error.message, where=words, hint=error.hint) from None
        self._reason = error.message
        self._chosen = self._openssh(self._chosen.options, users_master=False)
        self._announce()
        return self._chosen

    def open(self, command: str) -> Stream:
        """Opens a stream to a command. Raises HostError if the server runs no commands."""
        with self._lock:
            chosen = self._decide()
        return chosen.open(command)

    def close(self) -> None:
        if self._chosen is not None:
            self._chosen.close()

    def run_shell(self, command: str | None) -> int:
        """Runs `command` (None: the login shell) with a terminal there and this one here. Returns its exit status."""
        return self._decide().run_shell(command)

    def _decide(self) -> FabricTransport | OpenSSHTransport:
        self.start_connect()
        if self._attempt is not None:
            attempt, self._attempt = self._attempt, None
            attempt.finish()
        assert self._chosen is not None
        return self._chosen

    def _settle(self) -> None:
        try:
            self._choose()
        finally:
            self._way_known.set()

    def _choose(self) -> None:
        if self._way == "fabric":
            from deployer.transport.paramiko_ssh.connection import import_dial

            threading.Thread(target=import_dial, name="paramiko-import", daemon=True).start()
        options = resolve(
            self._target, self._ssh_key, config_file=self._config_file, connect_timeout_s=self._connect_timeout_s
        )
        self._limits = limits_of(options)
        lives = self._way != "fabric" and self._users_master_lives(options)
        self._reason = why_openssh(options, users_master=lives) if self._way == "auto" else ""
        if self._way == "openssh" and shutil.which("ssh") is None:
            raise UsageError("--transport openssh needs the ssh program", hint="install the OpenSSH client")
        if self._way == "openssh" or self._reason:
            self._chosen = self._openssh(options, users_master=lives)
        else:
            from deployer.transport.paramiko_ssh.connection import FabricTransport

            self._chosen = FabricTransport(options, accept_new_host_key=self._accept_new)
        self._chosen.start_connect()

    def _openssh(self, options: SshOptions, *, users_master: bool) -> OpenSSHTransport:
        from deployer.transport.ssh_program.connection import OpenSSHTransport

        return OpenSSHTransport(
            self._target,
            options,
            config_file=self._config_file,
            ssh_key=self._ssh_key,
            accept_new_host_key=self._accept_new,
            users_master=users_master,
        )

    def _users_master_lives(self, options: SshOptions) -> bool:
        path = options.control_path
        if path is None or shutil.which("ssh") is None or ("%" not in path and not Path(path).exists()):
            return False
        from deployer.transport.ssh_program.connection import users_master_lives

        return users_master_lives(self._target, self._config_file)


def limits_of(options: SshOptions) -> Limits:
    """The timeouts for this host, from its SSH options."""
    usual = Limits()
    limits = usual._replace(login_s=max(usual.login_s, options.connect_timeout_s))
    if not options.alive_every_s:
        return limits
    return limits._replace(ping_every_s=options.alive_every_s, dead_after_s=options.dead_after_s)


def why_openssh(options: SshOptions, *, users_master: bool = False) -> str:
    """Which option needs the ssh program, as text; empty if none does. `Match exec` does not, because `ssh -G` has
    already answered it."""
    if shutil.which("ssh") is None:
        return ""
    if users_master:
        return "a ControlMaster of yours is connected"
    if options.pkcs11:
        return "PKCS11Provider"
    if options.known_hosts_command:
        return "KnownHostsCommand"
    if options.proxy_passes_socket:
        return "ProxyUseFdpass"
    if options.jump is not None and (of_hop := why_openssh(options.jump)):
        return f"{of_hop} (for {options.jump.description})"
    if options.gssapi and _has_ticket():
        return "Kerberos ticket"
    return _why_identities(options) or _why_host_keys(options)


def _why_identities(options: SshOptions) -> str:
    from deployer.transport.ssh.key_files import blob_type, public_blob

    for path in options.identity_files:
        if not path.is_file():
            continue
        if blob_type(public_blob(path)).startswith("sk-"):
            return f"{path} is a security key: touch it when it blinks"
        certificate = path.with_name(path.name + "-cert.pub")
        if certificate.is_file():
            return f"certificate {certificate}"
    if options.certificate_files:
        return f"certificate {options.certificate_files[0]}"
    held = [] if options.identities_only or options.identity_agent is None else agent_key_types(options.identity_agent)
    odd = next((kind for kind in held if kind.startswith("sk-") or "-cert-v" in kind), "")
    return f"the agent holds a key of the type {odd}" if odd else ""


def _why_host_keys(options: SshOptions) -> str:
    """Whether a known-hosts file trusts a certificate authority for this host, as text: paramiko checks no host
    certificates. Most files have no such line and are not parsed."""
    for path in [*options.user_known_hosts, *options.global_known_hosts]:
        try:
            if b"@cert-authority" not in path.read_bytes():
                continue
        except OSError:
            continue
        known = read_known_keys([path], host_name_in_files(options)) + read_known_keys([path], options.hostname.lower())
        if any(key.marker == "@cert-authority" for key in known):
            return f"{path} trusts a certificate authority for it"
    return ""


def _has_ticket() -> bool:
    """Whether Kerberos has a valid ticket; asked only if there may be a cache of tickets."""
    cache = os.environ.get("KRB5CCNAME") or f"/tmp/krb5cc_{os.getuid()}"
    kind, _, path = cache.rpartition(":")
    if kind in ("", "FILE") and not Path(path).exists():
        return False
    try:
        done = subprocess.run(["klist", "-s"], stdin=subprocess.DEVNULL, capture_output=True, timeout=1.0, check=False)
        return done.returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def agent_key_types(path: str) -> list[str]:
    """Types of the keys that the SSH agent behind a socket holds; empty if it does not answer within a second."""
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(AGENT_TIMEOUT_S)
            sock.connect(path)
            sock.sendall(b"\0\0\0\1\x0b")  # SSH_AGENTC_REQUEST_IDENTITIES
            with sock.makefile("rb") as answer:
                size = struct.unpack(">I", answer.read(4))[0]
                return _parse_identities(answer.read(min(size, 1 << 20)))
    except (OSError, ValueError, struct.error):
        return []


def _parse_identities(answer: bytes) -> list[str]:
    """The key types in an SSH_AGENT_IDENTITIES_ANSWER: a byte, the number of keys, then a blob and a comment for
    each."""
    from deployer.transport.ssh.key_files import blob_type, first_string

    count, rest = struct.unpack(">I", answer[1:5])[0], answer[5:]
    types = []
    for _ in range(min(count, 1000)):
        blob = first_string(rest)
        types.append(blob_type(blob))
        rest = rest[4 + len(blob) :]
        rest = rest[4 + len(first_string(rest)) :]
    return types
