"""OpenSSH's known_hosts files: the known keys of a host, and whether its current key is one of them.

Only lines about our host are parsed. A hashed line costs one HMAC, so thousands of them cost milliseconds.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from deployer.transport.ssh.ssh_config import DEFAULT_PORT, SshOptions


@dataclass(frozen=True)
class KnownKey:
    """One line about our host."""

    marker: str
    """`""`, `@revoked` or `@cert-authority`."""
    key_type: str
    blob: bytes
    path: Path
    line: int

    @property
    def place(self) -> str:
        return f"{self.path}:{self.line}"


class Verdict(Enum):
    """How a host's key compares with the known keys."""

    KNOWN = "known"
    UNKNOWN = "unknown"
    CHANGED = "changed"
    REVOKED = "revoked"


def host_name_in_files(options: SshOptions) -> str:
    """The name that known_hosts files use for this host: the alias, `host`, or `[host]:port`."""
    if options.host_key_alias:
        return options.host_key_alias.lower()
    host = options.hostname.lower()
    return host if options.port == DEFAULT_PORT else f"[{host}]:{options.port}"


def read_known_keys(files: Iterable[Path], name: str) -> list[KnownKey]:
    """The lines of these files that are about `name`. Missing or unreadable files count as empty."""
    found = []
    for path in files:
        try:
            text = path.read_bytes()
        except OSError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            known = parse_line(line.decode("utf-8", "replace"), name, path=path, number=number)
            if known is not None:
                found.append(known)
    return found


def parse_line(text: str, name: str, *, path: Path, number: int) -> KnownKey | None:
    """The key in one line; None if the line is about another host or cannot be read."""
    fields = text.split()
    marker = fields.pop(0) if fields and fields[0].startswith("@") else ""
    if len(fields) < 3 or fields[0].startswith("#") or not matches(fields[0], name):
        return None
    try:
        blob = base64.b64decode(fields[2], validate=True)
    except ValueError:
        return None
    return KnownKey(marker=marker, key_type=fields[1], blob=blob, path=path, line=number)


def matches(field: str, name: str) -> bool:
    """Whether the first field of a line (hashed, or comma-separated patterns) covers `name`."""
    if field.startswith("|1|"):
        return _matches_hash(field, name)
    hit = False
    for pattern in field.lower().split(","):
        if pattern.startswith("!"):
            if _matches_pattern(pattern[1:], name):
                return False
        else:
            hit = hit or _matches_pattern(pattern, name)
    return hit


def _matches_pattern(pattern: str, name: str) -> bool:
    if "*" not in pattern and "?" not in pattern:
        return pattern == name
    regex = "".join({"*": ".*", "?": "."}.get(char, re.escape(char)) for char in pattern)
    return re.fullmatch(regex, name) is not None


def _matches_hash(field: str, name: str) -> bool:
    parts = field.split("|")
    if len(parts) != 4:
        return False
    try:
        salt, digest = base64.b64decode(parts[2]), base64.b64decode(parts[3])
    except ValueError:
        return False
    return hmac.compare_digest(hmac.digest(salt, name.encode(), "sha1"), digest)


def judge(known: Sequence[KnownKey], blob: bytes) -> tuple[Verdict, list[KnownKey]]:
    """The verdict on the host's key, and the lines that it is based on. If only other keys of the host are known, its
    key has changed."""
    revoked = [key for key in known if key.marker == "@revoked" and key.blob == blob]
    if revoked:
        return Verdict.REVOKED, revoked
    plain = [key for key in known if not key.marker]
    same = [key for key in plain if key.blob == blob]
    if same:
        return Verdict.KNOWN, same
    return (Verdict.CHANGED, plain) if plain else (Verdict.UNKNOWN, [])


def fingerprint(blob: bytes) -> str:
    """`SHA256:…`, as ssh-keygen -l prints it."""
    digest = hashlib.sha256(blob).digest()
    return "SHA256:" + base64.b64encode(digest).decode("ascii").rstrip("=")


def append_known_host(path: Path, name: str, *, key_type: str, blob: bytes, hashed: bool = False) -> None:
    """Writes one line. Creates the file (0600) and its folder (0700) if they are missing."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    field = hash_name(name, os.urandom(20)) if hashed else name
    line = f"{field} {key_type} {base64.b64encode(blob).decode('ascii')}\n"
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "rb+", buffering=0) as file:
        size = os.fstat(fd).st_size
        ends_open = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
        file.write((b"\n" if ends_open else b"") + line.encode())


def hash_name(name: str, salt: bytes) -> str:
    """The hashed form of a host name, as `HashKnownHosts yes` writes it."""
    digest = hmac.digest(salt, name.encode(), "sha1")
    return "|1|" + "|".join(base64.b64encode(part).decode("ascii") for part in (salt, digest))
