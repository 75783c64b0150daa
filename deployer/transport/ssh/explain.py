"""Sentences for what a host's silence, noise or refusal means, each with what to do about it."""

from __future__ import annotations

import errno
import re
import socket
from typing import TYPE_CHECKING

from deployer.errors import ConnectError, FerryError, HostError

if TYPE_CHECKING:
    from deployer.transport.ssh.ssh_config import SshOptions

_NO_EXEC = (
    r"(?i)(doesn't|does not) support PTY|requires? a (pty|tty|terminal)|not a tty|interactive (session|shell) only"
    r"|exec(ution)? (request )?(is )?not (supported|allowed|permitted)|command execution is (disabled|not)"
    r"|exec request failed|does not provide shell access|only sftp|This service allows sftp connections only"
)
_NO_LOGIN = (
    r"(?i)account is (currently )?not available|account (has|is) (been )?(disabled|expired|locked)|/nologin|/bin/false"
)
_EXPIRED = r"(?i)password (has|is) expired|required to change your password"
_OTHER_USER = r"(?i)login as the user [\"']([^\"']+)[\"']"
_NO_PYTHON = "torchferry-no-python"
_ESCAPES = r"\x1b(\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?|.)|[^\x20-\x7e\n\t\xa0-\U0010ffff]"


def explain_no_answer(stderr_text: str, noise: bytes, exit_status: int | None) -> FerryError:
    """The error for an exec that ended before our agent answered; `noise` is what came on stdout."""
    said = without_escapes(noise.decode("utf-8", "replace") + "\n" + stderr_text)
    if _NO_PYTHON in said:
        return HostError(
            "the host has no Python 3.8 or newer",
            hint="install python3 there; the job's own interpreter may be another one (--python)",
        )
    if found := re.search(_OTHER_USER, said):
        return HostError(f"the host wants another user: {found[0]}", hint=f"use --ssh {found[1]}@…")
    if re.search(_EXPIRED, said):
        return HostError("the account's password on the host has expired", hint="log in once with `ssh` and change it")
    if re.search(_NO_LOGIN, said):
        return HostError(
            "the account on the host may not log in (disabled, or its shell is nologin)",
            where=quote(said),
            hint="use another user, or have the account enabled",
        )
    if re.search(_NO_EXEC, said) or (not said.strip() and exit_status is None):
        return _relay_without_exec(said)
    return _ended_without_answer(said, exit_status)


def _relay_without_exec(said: str) -> FerryError:
    return HostError(
        "this SSH endpoint runs no commands, it only opens interactive terminals",
        where=quote(said),
        hint="it is a relay: use the machine's direct SSH address (root@IP:PORT, 'SSH over exposed TCP') instead",
    )


def _ended_without_answer(said: str, exit_status: int | None) -> FerryError:
    if re.search(r"/bin/sh(: | not |'?: )*(No such file|not found)", said):
        return HostError("the host has no /bin/sh", where=quote(said))
    status = "without an exit status" if exit_status is None else f"with exit status {exit_status}"
    return HostError(
        f"the host's shell ended {status} before it started our agent",
        where=quote(said),
        hint="try `ssh HOST /bin/sh -c true`: a start-up file that calls exec or exit, or a forced command, may be why",
    )


def quote(said: str) -> list[str]:
    """The last lines of what the host said, each marked as its words."""
    lines = [line.strip()[:200] for line in said.splitlines() if line.strip()]
    return [f"host: {line}" for line in lines[-5:]]


def without_escapes(text: str) -> str:
    """Text of a host without terminal escapes and control characters, to be searched for what it means. What is shown
    of it goes through `deployer.printable` all the same."""
    return re.sub(_ESCAPES, "", text.replace("\r\n", "\n").replace("\r", "\n"))


# --- no connection ----------------------------------------------------------------------------------------------------


def explain_socket_error(error: OSError, *, host: str, port: int, timeout_s: float) -> ConnectError:
    """The error for a TCP connection that failed."""
    where = f"{host}:{port}"
    if isinstance(error, socket.gaierror):
        return ConnectError(
            f"the host name {host!r} cannot be resolved: {error.strerror}",
            hint="check the spelling, or whether it is an alias that your ~/.ssh/config does not have",
        )
    if isinstance(error, TimeoutError):
        return ConnectError(
            f"{where} did not answer within {timeout_s:g} s",
            hint="the machine may be off, or a firewall drops the packets; --connect-timeout waits longer",
        )
    if isinstance(error, ConnectionRefusedError):
        return ConnectError(
            f"{where} refuses connections", hint="no SSH server listens there: check the port (host:PORT) and the host"
        )
    if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        return ConnectError(f"{where} cannot be reached: {error.strerror}", hint="check the network, or the VPN")
    return ConnectError(f"{where}: {error.strerror or error}")


def blame_hop(error: ConnectError, *, before: SshOptions) -> ConnectError:
    """The same error, said of the jump host before another host."""
    message = f"the jump host before {before.hostname} failed: {error.message}"
    return type(error)(message, where=error.where, hint=error.hint)


def explain_no_way_on(reason: str, *, hop: SshOptions, target: SshOptions) -> ConnectError:
    """The error for a jump host that let us in and cannot reach what comes next."""
    return ConnectError(
        f"the jump host {hop.description} cannot reach {target.hostname}:{target.port}: {reason}",
        hint="the address is looked up on the jump host; AllowTcpForwarding may be off there",
    )


def explain_silence(*, where: str, timeout_s: float) -> ConnectError:
    """The error for a port that accepts a connection and does not speak SSH in time."""
    return ConnectError(
        f"{where} accepted the connection, but no SSH handshake came within {timeout_s:g} s",
        hint="is this the SSH port? An overloaded server may also be slow",
    )


def explain_stalled_login(*, where: str, timeout_s: float) -> ConnectError:
    """The error for a server that began a login and does not go on with it."""
    return ConnectError(
        f"{where} did not finish the login within {timeout_s:g} s",
        hint="the server may be overloaded, or wait for something itself; --connect-timeout waits longer",
    )


def explain_handshake(reason: str, *, where: str) -> ConnectError:
    """The error for a connection that ended inside the handshake."""
    if "Indecipherable" in reason or "Invalid SSH banner" in reason:
        return ConnectError(f"{where} does not speak SSH", hint="check the port")
    if "Incompatible" in reason or "no acceptable" in reason:
        return ConnectError(f"{where}: no common SSH algorithm: {reason}", hint="the server may be too old")
    return ConnectError(
        f"{where} closed the connection during the SSH handshake: {reason}",
        hint="too many connections at once (MaxStartups), or this address is blocked there",
    )


def explain_auth(
    tried: list[str], skipped: list[str], *, where: str, user: str, methods: list[str], banner: str = ""
) -> ConnectError:
    """The error for a host that let nobody in: which keys were offered, which could not be, what it would accept."""
    lines = [f"offered: {name}" for name in tried] + [f"not offered: {name}" for name in skipped]
    if banner:
        lines += quote(without_escapes(banner))
    accepts = f"; it accepts {', '.join(methods)}" if methods else ""
    if methods and not {"publickey", "password", "keyboard-interactive"} & set(methods):
        return ConnectError(
            f"{where} only accepts {', '.join(methods)}",
            hint="a Kerberos login needs a ticket (kinit) and the ssh program (--transport openssh)",
        )
    if not tried:
        return ConnectError(
            f"{where}: there is no key to log in with{accepts}",
            where=lines,
            hint="make one with ssh-keygen and install it with ssh-copy-id, or name one with --ssh-key",
        )
    return ConnectError(
        f"{where} does not let {user!r} in with {_count(tried)}{accepts}",
        where=lines,
        hint="wrong user (root? ubuntu?), or the key is not in its ~/.ssh/authorized_keys; --ssh-key names a key",
    )


def _count(tried: list[str]) -> str:
    return "the key offered" if len(tried) == 1 else f"any of {len(tried)} keys"
