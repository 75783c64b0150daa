"""The keys to log in with, in ssh's order: the agent's first, then the files."""

from __future__ import annotations

import contextlib
import hashlib
import io
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import paramiko
from cryptography.hazmat.primitives import serialization
from paramiko.agent import AgentSSH

from deployer.errors import ConnectError
from deployer.paths import state_dir, write_whole
from deployer.printable import shown
from deployer.terminal import ask_secret
from deployer.transport.ssh.key_files import (
    LockedKey,
    UnusableKey,
    agent_trouble,
    check_key_file,
    key_label,
    key_type,
    public_blob,
)
from deployer.transport.ssh.ssh_config import SshOptions

PASSPHRASE_TRIES = 3
AGENT_TIMEOUT_S = 5.0
_SERVER = "SSH-2.0-OpenSSH_"
_USABLE = ("ssh-ed25519", "ssh-rsa", "ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521")


@dataclass(frozen=True)
class Candidate:
    """A key that can be offered; `load` may ask for its passphrase."""

    label: str
    load: Callable[[], paramiko.PKey]
    from_agent: bool = False


@dataclass(frozen=True)
class Keyring:
    """The keys to offer, and those that cannot be offered, with the reason."""

    candidates: list[Candidate]
    skipped: list[str]


def find_keys(options: SshOptions, ask: Callable[[Callable[[], str]], str] | None) -> Keyring:
    """All keys for a host. `ask` runs a question at the terminal; without it, encrypted files are left out."""
    skipped: list[str] = []
    files = [path for path in options.identity_files if path.is_file()]
    wanted = [blob for path in files if (blob := public_blob(path)) is not None]
    agent = _agent_keys(options, wanted, skipped)
    held = {key.asbytes() for key in agent}
    ready, locked = _file_candidates(files, held, ask, skipped)
    names = {blob: str(path) for path in reversed(files) if (blob := public_blob(path)) is not None}
    found = [
        Candidate(
            key_label(names.get(key.asbytes(), key.comment), key.get_name(), from_agent=True),
            lambda key=key: key,  # type: ignore[misc]
            True,
        )
        for key in agent
    ]
    if options.pkcs11:
        skipped.append("PKCS11Provider (smart cards need --transport openssh)")
    return Keyring([*found, *ready, *locked], skipped)


# --- files ------------------------------------------------------------------------------------------------------------


def _file_candidates(
    files: Sequence[Path], held: set[bytes], ask: Callable[[Callable[[], str]], str] | None, skipped: list[str]
) -> tuple[list[Candidate], list[Candidate]]:
    """Files that load at once, and encrypted files. The encrypted ones come last, so that no passphrase is requested in
    vain."""
    ready: list[Candidate] = []
    locked: list[Candidate] = []
    for path in files:
        if public_blob(path) in held:
            continue
        try:
            check_key_file(path)
            ready += _with_certificate(path, load_private_key(path))
        except UnusableKey as error:
            if isinstance(error, LockedKey) and ask is not None:
                locked.append(Candidate(str(path), lambda path=path: _unlock(path, ask)))  # type: ignore[misc]
            else:
                skipped.append(f"{path} ({error})")
    return ready, locked


def load_private_key(path: Path, passphrase: str | None = None) -> paramiko.PKey:
    """The key in a file. Raises PasswordRequiredException if it needs a passphrase, and UnusableKey with the reason."""
    try:
        text = path.read_text(encoding="ascii")
        kind = key_type(text)
        if kind == "PKCS8":
            return _load_pkcs8(text, passphrase)
        return _class_of(kind).from_private_key(io.StringIO(text), passphrase)
    except paramiko.PasswordRequiredException:
        raise
    except (UnicodeDecodeError, ValueError, OSError, paramiko.SSHException) as error:
        raise UnusableKey(str(error) or "it is no private key") from None


def _load_pkcs8(text: str, passphrase: str | None) -> paramiko.PKey:
    """Converts PKCS #8 to OpenSSH's format, since paramiko does not read it."""
    try:
        key = serialization.load_pem_private_key(text.encode(), passphrase.encode() if passphrase else None)
    except TypeError:
        raise paramiko.PasswordRequiredException("the key is encrypted") from None
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption())
    converted = key.private_bytes(*form).decode("ascii")
    return _class_of(key_type(converted)).from_private_key(io.StringIO(converted))


def _class_of(kind: str) -> type[paramiko.PKey]:
    if kind == "ssh-ed25519":
        return paramiko.Ed25519Key
    if kind == "ssh-rsa":
        return paramiko.RSAKey
    if kind.startswith("ecdsa-"):
        return paramiko.ECDSAKey
    if kind.startswith("sk-"):
        raise UnusableKey("a security key; it needs --transport openssh")
    raise UnusableKey(f"{kind} is not supported")


def _with_certificate(path: Path, key: paramiko.PKey) -> list[Candidate]:
    """The key, preceded by its certificate if there is one beside it."""
    plain = Candidate(key_label(str(path), key.get_name()), lambda: key)
    certificate = path.with_name(path.name + "-cert.pub")
    if not certificate.is_file():
        return [plain]
    try:
        signed = load_private_key(path)
        signed.load_certificate(str(certificate))
    except (ValueError, OSError, paramiko.SSHException):
        return [plain]
    return [Candidate(key_label(str(path), f"{key.get_name()}-CERT"), lambda: signed), plain]


def _unlock(path: Path, ask: Callable[[Callable[[], str]], str]) -> paramiko.PKey:
    for _ in range(PASSPHRASE_TRIES):
        passphrase = ask(lambda: ask_secret(shown(f"Passphrase of {path}: ")))
        try:
            return load_private_key(path, passphrase)
        except (UnusableKey, paramiko.PasswordRequiredException):
            continue
    raise ConnectError(f"the passphrase of {path} was wrong {PASSPHRASE_TRIES} times")


# --- the agent --------------------------------------------------------------------------------------------------------


class _Agent(AgentSSH):
    """The agent behind one socket; paramiko's class supports only SSH_AUTH_SOCK."""

    def __init__(self, path: str) -> None:
        super().__init__()
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(AGENT_TIMEOUT_S)
        sock.connect(path)
        self._connect(sock)  # type: ignore[attr-defined]
        sock.settimeout(None)  # a signature may wait for a person


def _agent_keys(options: SshOptions, wanted: Sequence[bytes], skipped: list[str]) -> list[paramiko.AgentKey]:
    """Usable keys of the agent: those of the identity files first, and only those with IdentitiesOnly."""
    if options.identity_agent is None:
        return []
    try:
        keys = _Agent(options.identity_agent).get_keys()
    except (OSError, paramiko.SSHException) as error:
        skipped.append(agent_trouble(options.identity_agent, error))
        return []
    usable = [key for key in keys if key.get_name() in _USABLE]
    odd = [key for key in keys if key not in usable]
    skipped += [f"agent: {key.comment} ({key.get_name()} needs --transport openssh)" for key in odd]
    named = [key for key in usable if key.asbytes() in wanted]
    return named if options.identities_only else named + [key for key in usable if key not in named]


# --- the last key that succeeded --------------------------------------------------------------------------------------


def may_ask_early(session: paramiko.Transport, options: SshOptions, key: paramiko.PKey) -> bool:
    """Whether this server supports an EarlyChannel and this key is the one that succeeded the last time."""
    if not session.remote_version.startswith(_SERVER):
        return False
    try:
        return _note_of(options).read_text() == _digest(key)
    except (OSError, UnicodeError):
        return False


def note_key(options: SshOptions, key: paramiko.PKey) -> None:
    """Remembers the key that succeeded."""
    with contextlib.suppress(OSError):
        write_whole(_note_of(options), _digest(key).encode("ascii"))


def _note_of(options: SshOptions) -> Path:
    return state_dir() / "logins" / hashlib.blake2b(options.description.encode(), digest_size=16).hexdigest()


def _digest(key: paramiko.PKey) -> str:
    return hashlib.blake2b(key.asbytes(), digest_size=16).hexdigest()
