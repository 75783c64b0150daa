"""Decides whether to trust a host's key, by the known_hosts files, the options and the person."""

from __future__ import annotations

import base64
import shlex
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from deployer.errors import ConnectError, HostKeyError
from deployer.printable import shown
from deployer.terminal import ask_yes, notice
from deployer.transport.ssh.known_hosts import (
    KnownKey,
    Verdict,
    append_known_host,
    fingerprint,
    host_name_in_files,
    judge,
    read_known_keys,
)
from deployer.transport.ssh.ssh_config import DEFAULT_PORT, SshOptions

Ask = Callable[[Callable[[], bool]], bool]
"""Runs a question in the thread that can ask the person."""


class HostKeys:
    """The known keys of one host."""

    def __init__(self, options: SshOptions) -> None:
        self.options = options
        self.name = host_name_in_files(options)
        files = [*options.user_known_hosts, *options.global_known_hosts]
        self.known = read_known_keys(files, self.name)
        if options.port != DEFAULT_PORT and not options.host_key_alias and not self.known:
            self.portless = read_known_keys(files, options.hostname.lower())
        else:
            self.portless = []

    @property
    def types(self) -> list[str]:
        """Key types to request from the host first: those of its known keys."""
        return [key.key_type for key in [*self.known, *self.portless] if not key.marker]

    def check(self, key_type: str, blob: bytes, *, accept_new: bool, ask: Ask | None) -> None:
        """Returns if the key is trusted; records it if it is new. Otherwise raises ConnectError."""
        verdict, lines = judge(self.known, blob)
        if verdict is Verdict.UNKNOWN:
            verdict, lines = self._judge_without_port(blob)
        revoked = self.options.revoked_host_keys
        if verdict is Verdict.REVOKED or (revoked is not None and is_revoked_by(revoked, key_type, blob)):
            raise self.revoked(f"{key_type} {fingerprint(blob)}")
        if verdict is Verdict.CHANGED:
            raise self._changed(f"{key_type} {fingerprint(blob)}", lines)
        if verdict is Verdict.UNKNOWN:
            self._meet(key_type, blob, accept_new=accept_new, ask=ask)

    def _judge_without_port(self, blob: bytes) -> tuple[Verdict, list[KnownKey]]:
        """Like ssh: a line for the bare host name can confirm the key of another port, but cannot contradict it."""
        verdict, lines = judge(self.portless, blob)
        return (Verdict.UNKNOWN, []) if verdict is Verdict.CHANGED else (verdict, lines)

    def refusal(self, key: str, *, changed: bool) -> ConnectError:
        """The error for a key that the ssh program has refused; `key`: its type and fingerprint."""
        lines = [key for key in [*self.known, *self.portless] if not key.marker]
        return self._changed(key, lines) if changed else self._unknown(key)

    def revoked(self, key: str) -> ConnectError:
        """The error for a key that must not be trusted any more; `key`: its type and fingerprint."""
        lines = [line for line in self.known if line.marker == "@revoked" and fingerprint(line.blob) == key.split()[-1]]
        return HostKeyError(
            f"the key of {self.name} is marked as revoked: {key}",
            where=lines[0].place if lines else str(self.options.revoked_host_keys),
            hint="do not connect: somebody may have got hold of this key",
        )

    def _changed(self, key: str, lines: list[KnownKey]) -> ConnectError:
        files = dict.fromkeys(line.path for line in lines)
        remove = "; ".join(f"ssh-keygen -f {shlex.quote(str(path))} -R {shlex.quote(self.name)}" for path in files)
        known = [f"before: {line.key_type} {fingerprint(line.blob)} ({line.place})" for line in lines]
        return HostKeyError(
            f"the host key of {self.name} has changed: it is now {key}",
            where=known,
            hint="the host was reinstalled, or somebody intercepts the connection. "
            f"Ask its owner. If the new key is right, remove the old one: {remove}",
        )

    def _meet(self, key_type: str, blob: bytes, *, accept_new: bool, ask: Ask | None) -> None:
        key = f"{key_type} {fingerprint(blob)}"
        if self.options.strict_host_key == "accept-new" or accept_new:
            notice(shown(f"New host key of {self.name} accepted: {key}"))
        elif ask is None or self.options.strict_host_key == "yes":
            raise self._unknown(key)
        elif not ask(lambda: self._person_trusts(key)):
            raise HostKeyError(f"the host key of {self.name} was not accepted")
        for path in self.options.user_known_hosts[:1]:
            self._remember(path, key_type, blob)

    def _person_trusts(self, key: str) -> bool:
        notice(shown(f"The host key of {self.name} is not known: {key}"))
        return ask_yes(shown("Connect and remember it?"))

    def _unknown(self, key: str) -> ConnectError:
        port = "" if self.options.port == DEFAULT_PORT else f"-p {self.options.port} "
        return HostKeyError(
            f"the host key of {self.name} is not known: {key}",
            hint="compare the fingerprint with the provider's. If they are equal, add --accept-new-host-key, or run: "
            f"ssh-keyscan {port}{shlex.quote(self.options.hostname)} >> ~/.ssh/known_hosts",
        )

    def _remember(self, path: Path, key_type: str, blob: bytes) -> None:
        try:
            append_known_host(path, self.name, key_type=key_type, blob=blob, hashed=self.options.hash_known_hosts)
        except OSError as error:
            notice(shown(f"The host key could not be written to {path}: {error.strerror}"))


def is_revoked_by(path: Path, key_type: str, blob: bytes) -> bool:
    """Whether a RevokedHostKeys file (keys, or a KRL) contains this key. As in ssh, an unreadable file revokes all
    keys."""
    line = f"{key_type} {base64.b64encode(blob).decode('ascii')}\n"
    try:
        content = path.read_bytes()
    except OSError:
        return True
    if not content.startswith(b"SSHKRL\n\0"):
        return line.encode().split() in [text.split()[:2] for text in content.splitlines()]
    with tempfile.NamedTemporaryFile("w", suffix=".pub") as file:
        file.write(line)
        file.flush()
        query = ["ssh-keygen", "-Q", "-f", str(path), file.name]
        return subprocess.run(query, stdin=subprocess.DEVNULL, capture_output=True, check=False).returncode != 0
