"""What a private key file says about itself, read without its passphrase and without an SSH library."""

from __future__ import annotations

import base64
import re
import struct
from pathlib import Path

_MAGIC = b"openssh-key-v1\x00"


class UnusableKey(Exception):
    """A key that cannot be offered; the text says why."""


def key_type(text: str) -> str:
    """The type of a private key file, read without its passphrase. UnusableKey when it is none."""
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
    """The public half of a key file, private (without its passphrase) or public; None when it cannot be told."""
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
    """The type of a public key, such as `ssh-ed25519`; "" when there is none."""
    try:
        return first_string(blob or b"").decode("ascii", "replace")
    except struct.error:
        return ""
