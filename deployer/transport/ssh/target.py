"""The host that `--ssh` names, as the user typed it."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, replace

from deployer.errors import UsageError

_FORBIDDEN = frozenset("'\"`$\\;&<>|(){}[]%/,*?!#")
"""Characters that OpenSSH refuses in a host name, or that would be a pattern or a token in its files."""


_FLAGS = "1246AaCfGgKkMNnqsTtVvXxYyB:b:c:D:E:e:F:I:i:J:L:l:m:O:o:P:p:Q:R:S:W:w:"
"""The options of ssh, in getopt's form."""
_OPTIONS = (
    "addressfamily bindaddress connectionattempts connecttimeout hostname identitiesonly identityfile port proxyjump "
    "serveralivecountmax serveraliveinterval stricthostkeychecking tcpkeepalive user userknownhostsfile"
)
"""The keywords that `-o` may set. Keywords that run a command on this machine belong in the user's own file; the rest
would have no effect."""

_SHORT = {"-J": "ProxyJump=", "-b": "BindAddress=", "-4": "AddressFamily=inet", "-6": "AddressFamily=inet6"}


@dataclass(frozen=True)
class Target:
    """An address as typed: `host` may be an alias from ssh_config. None: the configuration decides."""

    host: str
    user: str | None
    port: int | None
    text: str
    key: str | None = None
    """The file given with `-i`."""
    config: str | None = None
    """The file given with `-F`."""
    flags: tuple[str, ...] = ()
    """`-o` options for ssh, each with its `Keyword=value`."""
    ignored: tuple[str, ...] = ()
    """The parts of a whole ssh command that have no effect here, such as forwards."""

    @property
    def address(self) -> str:
        """The shortest text with the same meaning, without `key` and `ignored`."""
        host = f"[{self.host}]" if ":" in self.host and self.port is not None else self.host
        user = f"{self.user}@" if self.user is not None else ""
        place = f"{user}{host}" + (f":{self.port}" if self.port is not None else "")
        config = ("-F", self.config) if self.config else ()
        return shlex.join(["ssh", *config, *self.flags, place]) if config or self.flags else place


def parse_target(text: str) -> Target:
    """Parses `[user@]host[:port]`, `[::1]:22`, `user@::1`, `ssh://…` or an alias; also a whole command as providers
    print it, `ssh -p 22 -i KEY user@host`. Raises UsageError for other text."""
    if " " in text:
        return _parse_command(text)
    rest = text.removeprefix("ssh://").rstrip("/") if text.startswith("ssh://") else text
    user, at, address = rest.rpartition("@")
    if at:
        _check_user(user, text)
    host, port = _split_port(address, text)
    _check_host(host, text)
    return Target(host=host, user=user if at else None, port=port, text=text)


def _parse_command(text: str) -> Target:
    import getopt  # few addresses are commands

    try:
        words = shlex.split(text)
        options, rest = getopt.getopt(words[words[:1] == ["ssh"] :], _FLAGS)
        more, command = getopt.getopt(rest[1:], _FLAGS)  # ssh also takes options after the host
    except (ValueError, getopt.GetoptError) as error:
        raise UsageError(f"{text!r} is no ssh command: {error}", hint="write [user@]host[:port]") from None
    if not rest:
        raise UsageError(f"{text!r} names no host", hint="write [user@]host[:port] or an alias of ~/.ssh/config")
    options += more
    given = dict(reversed(options))  # ssh uses the first value
    target = parse_target(rest[0])
    if "-p" in given:
        target = replace(target, port=_parse_port(given["-p"], text))
    if "-l" in given:
        _check_user(given["-l"], text)
        target = replace(target, user=given["-l"])
    if command:
        if command[0].isdigit() and target.port is None:
            target = replace(target, port=_parse_port(command[0], text))
        raise UsageError(
            f"--ssh takes an address and no more: {shlex.join(command)!r}", hint=f"write --ssh {target.address}"
        )
    target = replace(target, text=text, key=given.get("-i"), config=given.get("-F"), flags=())
    for flag, value in options:
        if flag in _SHORT:
            target = _with_option(target, _SHORT[flag] + value)
        elif flag == "-o":
            target = _with_option(target, value)
        elif flag not in ("-p", "-l", "-i", "-F"):
            target = replace(target, ignored=(*target.ignored, f"{flag} {value}".strip()))
    return target


def _with_option(target: Target, option: str) -> Target:
    name, _, value = (part.strip() for part in re.sub(r"[ =]+", "=", option.strip(), count=1).partition("="))
    if name.lower().endswith("command"):
        raise UsageError(
            f"{target.text!r}: {name} is not taken from an address",
            hint="put it into ~/.ssh/config, under a separate Host",
        )
    if name.lower() not in _OPTIONS.split() or not value.isprintable():
        return replace(target, ignored=(*target.ignored, f"-o {option}"))
    if name.lower() == "proxyjump":
        _check_jumps(value, target.text)
    return replace(target, flags=(*target.flags, "-o", f"{name}={value}"))


def _check_jumps(jumps: str, text: str) -> str:
    for jump in jumps.split(","):
        if jump.startswith("-") or parse_target(jump).flags:
            raise UsageError(
                f"{text!r}: {jump!r} is no jump host", hint="-J takes [user@]host[:port], several with commas"
            )
    return jumps


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
