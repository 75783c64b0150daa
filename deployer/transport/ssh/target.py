"""Whom `--ssh` means: the address that the user typed."""

from __future__ import annotations

import re
from dataclasses import dataclass

from deployer.errors import UsageError

_FORBIDDEN = frozenset("'\"`$\\;&<>|(){}[]%/,*?!#")
"""What OpenSSH refuses in a host name, and what would be a pattern or a token in its files."""


@dataclass(frozen=True)
class Target:
    """An address as typed: `host` may be an alias of ssh_config. None means that the configuration decides."""

    host: str
    user: str | None
    port: int | None
    text: str


def parse_target(text: str) -> Target:
    """The parts of `[user@]host[:port]`, `[::1]:22`, `user@::1`, `ssh://…` or an alias. UsageError when it is none."""
    rest = text.removeprefix("ssh://").rstrip("/") if text.startswith("ssh://") else text
    user, at, address = rest.rpartition("@")
    if at:
        _check_user(user, text)
    host, port = _split_port(address, text)
    _check_host(host, text)
    return Target(host=host, user=user if at else None, port=port, text=text)


def _split_port(address: str, text: str) -> tuple[str, int | None]:
    bracketed = re.fullmatch(r"\[([^\[\]]+)\](?::(.*))?", address)
    if bracketed:
        return bracketed[1], None if bracketed[2] is None else _parse_port(bracketed[2], text)
    if address.count(":") != 1:  # none, or a bare IPv6 address
        return address, None
    host, _, port = address.partition(":")
    return host, _parse_port(port, text)


def _parse_port(port: str, text: str) -> int:
    if port.isascii() and port.isdigit() and 1 <= int(port) <= 65535:
        return int(port)
    raise UsageError(f"{text!r}: {port!r} is not a port", hint="ports are 1 to 65535, as in root@host:2222")


def _check_host(host: str, text: str) -> None:
    if not host:
        raise UsageError(f"{text!r} names no host", hint="write [user@]host[:port] or an alias of ~/.ssh/config")
    if ":" in host:
        if not re.fullmatch(r"[0-9A-Fa-f:.]+(%[A-Za-z0-9_.-]+)?", host):
            raise UsageError(f"{text!r}: {host!r} is not an address", hint="IPv6 with a port is written [::1]:22")
        return
    _refuse_hostile("host", host, text, forbidden=_FORBIDDEN)


def _check_user(user: str, text: str) -> None:
    if ":" in user:
        raise UsageError(
            f"the address of {text.rpartition('@')[2]!r} carries a password",
            hint="leave it out: a password is asked for on the terminal; better, use a key (ssh-copy-id)",
        )
    if not user:
        raise UsageError(f"{text!r}: the user before @ is empty")
    _refuse_hostile("user", user, text, forbidden=_FORBIDDEN - {"\\"})


def _refuse_hostile(what: str, value: str, text: str, *, forbidden: frozenset[str]) -> None:
    if value.startswith("-"):
        raise UsageError(f"{text!r}: a {what} cannot begin with '-'")
    for char in value:
        if char in forbidden or char.isspace() or not char.isprintable():
            raise UsageError(f"{text!r}: a {what} cannot contain {char!r}")
