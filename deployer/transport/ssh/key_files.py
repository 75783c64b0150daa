"""Facts about a private key file, read without its passphrase and without an SSH library."""

from __future__ import annotations

import base64
import os
import re
import stat
import struct
from pathlib import Path

_MAGIC = b"openssh-key-v1\x00"


class UnusableKey(Exception):
    """A key that cannot be offered; the text says why."""


class LockedKey(UnusableKey):
    """A key file with a passphrase."""


def check_key_file(path: Path) -> None:
    """Returns if the private key can be used without a passphrase. Raises LockedKey, or UnusableKey with the reason."""
    try:
        text = path.read_text(encoding="ascii")
        key_type(text)
        info = path.stat()
    except UnicodeDecodeError:
        raise UnusableKey("it is no private key") from None
    except OSError as error:
        raise UnusableKey(error.strerror or str(error)) from None
    mode = stat.S_IMODE(info.st_mode)
    if info.st_uid == os.getuid() and mode & 0o077:  # like ssh, which rejects such a file
        raise UnusableKey(f"its mode {mode:04o} opens it to others: chmod 600 it")
    if _is_locked(text):
        raise LockedKey("it has a passphrase and there is no terminal to ask on: ssh-add it")


def _is_locked(text: str) -> bool:
    if "BEGIN OPENSSH PRIVATE KEY" not in text:
        return "ENCRYPTED" in text
    data = base64.b64decode(text.split("PRIVATE KEY-----")[1].split("-----END")[0])
    return first_string(data[len(_MAGIC) :]) != b"none"


def key_label(name: str, kind: str, *, from_agent: bool = False) -> str:
    """An offered key as shown to the user: its file name or the agent's name for it, and its type as ssh shows it."""
    short = "ECDSA" if kind.startswith("ecdsa") else kind.removeprefix("ssh-").upper()
    return f"{name} ({short}{', agent' if from_agent else ''})"


def agent_trouble(path: str, error: Exception) -> str:
    """An unreachable agent, as shown in the list of unusable keys."""
    return f"agent at {path} ({getattr(error, 'strerror', None) or error})"


def key_type(text: str) -> str:
    """The type of a private key file, read without its passphrase. Raises UnusableKey if it is not one."""
    header = re.search(r"-----BEGIN ([A-Z0-9 ]*)PRIVATE KEY-----", text)
    if header is None:
        hint = "convert it with puttygen -O private-openssh" if text.startswith("PuTTY") else "it is no private key"
        raise UnusableKey(hint)
    if header[1] != "OPENSSH ":
        return {"RSA ": "ssh-rsa", "EC ": "ecdsa-", "": "PKCS8", "ENCRYPTED ": "PKCS8"}.get(
            header[1], header[1].strip()
        )
    return first_string(openssh_public_blob(text)).decode("ascii", "replace")


def public_blob(path: Path) -> bytes | None:
    """The public half of a private key file (read without its passphrase) or of a public one; None if it cannot be
    read."""
    try:
        text = path.read_text(encoding="utf-8")
        if "BEGIN OPENSSH PRIVATE KEY" in text:
            return openssh_public_blob(text)
        if "PRIVATE KEY" in text:
            text = path.with_name(path.name + ".pub").read_text()
        return base64.b64decode(text.split()[1], validate=True)
    except (OSError, ValueError, IndexError, UnusableKey):
        return None


def openssh_public_blob(text: str) -> bytes:
    """PROTOCOL.key of OpenSSH: magic, cipher, KDF, KDF options, number of keys, public key."""
    try:
        body = text.split("PRIVATE KEY-----")[1].split("-----END")[0]
        data = base64.b64decode(body)
        if not data.startswith(_MAGIC):
            raise ValueError
        data = data[len(_MAGIC) :]
        for _ in range(3):
            data = data[4 + struct.unpack(">I", data[:4])[0] :]
        size = struct.unpack(">I", data[4:8])[0]
        return data[8 : 8 + size]
    except (ValueError, IndexError, struct.error):
        raise UnusableKey("the file is damaged") from None


def first_string(data: bytes) -> bytes:
    size = struct.unpack(">I", data[:4])[0]
    return data[4 : 4 + size]


def blob_type(blob: bytes | None) -> str:
    """The type of a public key, such as `ssh-ed25519`; "" for None."""
    try:
        return first_string(blob or b"").decode("ascii", "replace")
    except struct.error:
        return ""
