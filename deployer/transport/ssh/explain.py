"""Error messages for a host that is silent, prints unexpected output or refuses, each with a hint."""

from __future__ import annotations

import errno
import re
import socket
from typing import TYPE_CHECKING

from deployer.errors import ConnectError, FerryError, HostError, LoginRefused
from deployer.transport.ssh.attempt import HandshakeCut
from deployer.transport.ssh.causes import (
    ACCOUNT,
    CROWDED,
    KEYS,
    LOGIN,
    MORE_KEYS,
    NO_EXEC,
    TOO_MANY_KEYS,
    cause_of,
)

if TYPE_CHECKING:
    from deployer.transport.ssh.ssh_config import SshOptions

_NO_PYTHON = "torchferry-no-python"
NO_OUTPUT = 99
"""The loader's exit status if its output does not reach a client."""
LOST = 255
"""The ssh program's exit status for its own failures, and for a command that was ended by a signal."""
QUOTED_BYTES = 8192
HEARD_LINES = 3
"""Lines to keep of the text received in place of SSH's first line."""
_ESCAPES = r"\x1b(\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?|.)|[^\x20-\x7e\n\t\xa0-\U0010ffff]"


def explain_no_answer(stderr_text: str, noise: bytes, exit_status: int | None) -> FerryError:
    """The error for an exec that ended before our agent answered; `noise`: its stdout."""
    said = _words(noise, stderr_text)
    if re.search(rf"(?m)^{_NO_PYTHON}$", said):
        return _no_python(re.sub(rf"(?m)^{_NO_PYTHON}$", "", said))
    if exit_status == NO_OUTPUT:
        return HostError(
            "the host's login leads the output of commands elsewhere (exec >FILE), so no answer can come",
            where=quote(said),
            hint="make its shell start-up files do so for terminals alone",
        )
    if known := cause_of(said, LOGIN):
        return HostError(known[0], where=quote(said), hint=known[1])
    return _ended_without_answer(said, exit_status)


def _words(noise: bytes, stderr_text: str) -> str:
    return without_escapes(noise[-QUOTED_BYTES:].decode("utf-8", "replace") + "\n" + stderr_text)


def explain_no_exec() -> FerryError:
    """The error for a server that refuses to run a command, or ends it at once without output and without a status.
    With the ssh program both look the same."""
    return HostError(
        "this SSH endpoint runs no commands: it ended ours without a word and without an exit status",
        hint=f"{NO_EXEC.hint}; or the login shell is missing there (ChrootDirectory) or was killed",
    )


def explain_silent_login(stderr_text: str, noise: bytes, *, host: str, silent_s: float) -> FerryError:
    """The error for a login that does not end and does not start our command."""
    said = _words(noise, stderr_text)
    if known := cause_of(said, LOGIN):
        return HostError(known[0], where=quote(said), hint=known[1])
    return HostError(
        f"the login on {host} has not come to our command: it says nothing for {silent_s:g} s; nothing was started",
        where=quote(said),
        hint="a start-up file, a menu or a forced command waits there, or a slow disk; --connect-timeout waits longer",
    )


def _no_python(said: str) -> FerryError:
    where = quote(said)
    if not where:
        return HostError(
            "the host has no Python 3.8 or newer",
            hint="install python3 there: Torchferry itself needs it; for the job alone, --python names another "
            "interpreter",
        )
    return HostError(
        "none of the host's interpreters runs as Python 3.8 or newer",
        where=where,
        hint="repair python3 there, or install one as /usr/bin/python3; for the job alone, --python names another one",
    )


def _ended_without_answer(said: str, exit_status: int | None) -> FerryError:
    # one of the two transports cannot distinguish status 255 from an end by a signal
    known = exit_status is not None and exit_status != LOST
    status = f"with exit status {exit_status}" if known else "without an exit status"
    if not known and not said.strip():
        return explain_no_exec()
    hint = "a start-up file that calls exec or exit, or a forced command, may be why"
    return HostError(
        f"the host's shell ended {status} before it started our agent",
        where=quote(said),
        hint=f"try `ssh HOST /bin/sh -c true`: {hint}",
    )


def quote(said: str) -> list[str]:
    """The last lines of the host's output, each marked as the host's."""
    lines = [line.strip()[:200] for line in said.splitlines() if line.strip()]
    return [f"host: {line}" for line in lines[-5:]]


def without_escapes(text: str) -> str:
    """A host's text without terminal escapes and control characters, to be matched against patterns. Displayed text
    still passes through `deployer.printable`."""
    return re.sub(_ESCAPES, "", text.replace("\r\n", "\n").replace("\r", "\n"))


# --- no connection ----------------------------------------------------------------------------------------------------


def explain_socket_error(error: OSError, *, host: str, port: int, timeout_s: float) -> ConnectError:
    """The error for a TCP connection that failed."""
    where = f"{host}:{port}"
    if isinstance(error, socket.gaierror):
        return ConnectError(
            f"the host name {host!r} cannot be resolved: {error.strerror}",
            hint="check the spelling; an alias must be in your ~/.ssh/config",
        )
    if isinstance(error, TimeoutError):
        return ConnectError(
            f"{where} did not answer within {timeout_s:g} s",
            hint="the machine may be off, or a firewall drops the packets; --connect-timeout waits longer",
        )
    if isinstance(error, ConnectionRefusedError):
        return ConnectError(
            f"{where} refuses connections", hint="no SSH server listens there: check the host and the port (HOST:PORT)"
        )
    if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        return ConnectError(f"{where} cannot be reached: {error.strerror}", hint="check the network, or the VPN")
    return ConnectError(f"{where}: {error.strerror or error}")


def blame_hop(error: ConnectError, *, before: SshOptions) -> ConnectError:
    """The same error, attributed to the jump host before another host."""
    message = f"the jump host before {before.hostname} failed: {error.message}"
    return type(error)(message, where=error.where, hint=error.hint)


def explain_no_way_on(reason: str, *, hop: SshOptions, target: SshOptions) -> ConnectError:
    """The error for a jump host that accepted the login but cannot reach the next host."""
    return ConnectError(
        f"the jump host {hop.description} cannot reach {target.hostname}:{target.port}: {reason}",
        hint="the address is looked up on the jump host; AllowTcpForwarding may be off there",
    )


def explain_silence(*, where: str, timeout_s: float, proxied: bool = False, beside: str = "") -> ConnectError:
    """The error for a port that accepts a connection but does not speak SSH in time. `proxied`: a ProxyCommand connects
    to it, and `beside` is its stderr output."""
    if proxied:
        return ConnectError(
            f"the ProxyCommand to {where} brought no SSH handshake within {timeout_s:g} s",
            where=quote(beside),
            hint="try the command by hand: a server's first line must come; --connect-timeout waits longer",
        )
    return ConnectError(
        f"{where} accepted the connection, but no SSH handshake came within {timeout_s:g} s",
        hint="is this the SSH port? An overloaded server may also be slow",
    )


def explain_no_greeting(*, where: str, heard: list[str], proxied: bool, beside: str = "") -> ConnectError:
    """The error for a connection that ended before the server's first line; `heard`: the lines received in its
    place."""
    heard = [line for line in heard[:HEARD_LINES] if line.strip() and line.isprintable() and line[:4] != "SSH-"]
    if proxied:
        return explain_proxy_ended("\n".join([*heard, beside]), where=where)
    if heard and not re.search(CROWDED, heard[0]):
        return ConnectError(f"{where} does not speak SSH", where=quote("\n".join(heard)), hint="check the port")
    return explain_cut(where=where, said="\n".join(heard))


def explain_proxy_ended(said: str, *, where: str) -> ConnectError:
    """The error for a ProxyCommand that ended before a login. It is not run again: ssh too runs it only once."""
    return ConnectError(
        f"the ProxyCommand to {where} ended amid the SSH handshake, or before it",
        where=quote(said),
        hint="try the command by hand: it has to connect its stdin and stdout with the server",
    )


def explain_cut(*, where: str, said: str = "") -> ConnectError:
    """The error for a connection that ended inside the handshake."""
    return HandshakeCut(
        f"{where} closed the connection during the SSH handshake",
        where=quote(said),
        hint="too many connections at once (MaxStartups), or this address is blocked there (fail2ban, a firewall)",
    )


def explain_stalled_login(*, where: str, timeout_s: float) -> ConnectError:
    """The error for a server that began a login but does not continue it."""
    return ConnectError(
        f"{where} did not finish the login within {timeout_s:g} s",
        hint="the server may be overloaded, or wait for something itself; --connect-timeout waits longer",
    )


def explain_no_session(where: str) -> ConnectError:
    """The error for a server that accepts the login but opens no session."""
    return ConnectError(f"{where} opens no session", hint="the server's MaxSessions is reached, or 0")


class NoCommonAlgorithm(ConnectError):
    """The server and this side's SSH implementation have no common algorithm; another SSH implementation may have
    one."""


def explain_incompatible(what: str, offered: str, *, where: str) -> ConnectError:
    """The error for a server whose algorithms for `what` are all unknown to this side."""
    return NoCommonAlgorithm(
        f"{where} offers no {what} that this side has: {offered}",
        hint="update the older side, or allow one more in its settings (sshd_config there, ssh_config here)",
    )


def explain_broken_handshake(reason: str, *, where: str) -> ConnectError:
    """The error for a server that violates the protocol, or does not prove that it holds its host key."""
    return ConnectError(f"{where}: the SSH handshake failed: {reason}", hint="try `ssh` by hand")


def explain_old_protocol(*, where: str) -> ConnectError:
    """The error for a server that speaks only the SSH protocol from before 2006."""
    return ConnectError(f"{where} speaks version 1 of SSH, which is not safe", hint="update the server")


def explain_cut_login(*, where: str, said: str = "") -> ConnectError:
    """The error for a server that hung up during the login, without a refusal."""
    known = cause_of(said, ACCOUNT)
    message = f"{where} closed the connection during the login"
    return ConnectError(
        f"{message}: {known[0]}" if known else message,
        where=quote(said),
        hint=known[1] if known else "try again; if it stays so, the server's own log says why",
    )


def explain_auth(
    tried: list[str], skipped: list[str], *, where: str, user: str, methods: list[str], said: str = ""
) -> ConnectError:
    """The error for a refused login: the offered keys, the unusable keys, the methods that the host would accept, and
    its messages."""
    lines = [f"offered: {name}" for name in tried] + [f"not usable: {name}" for name in skipped]
    too_many = re.search(TOO_MANY_KEYS, said)
    lines += quote(said)
    accepts = f"; login methods it allows: {', '.join(methods)}" if methods else ""
    if too_many:
        return LoginRefused(
            f"{where} lets nobody try more than {_keys(len(tried))}, and none of them was the right one",
            where=lines,
            hint=MORE_KEYS,
        )
    if methods and not {"publickey", "password", "keyboard-interactive"} & set(methods):
        return LoginRefused(
            f"{where} allows only these login methods: {', '.join(methods)}",
            where=lines,
            hint="a Kerberos login needs a ticket (kinit) and the ssh program (--transport openssh)",
        )
    known = cause_of(said, ACCOUNT)
    if not tried:
        hint = "make one with ssh-keygen and install it with ssh-copy-id, or name one with --ssh-key"
        return LoginRefused(
            f"{where}: there is no key to log in with{accepts}",
            where=lines,
            hint="make the key usable, or name another one with --ssh-key" if skipped else hint,
        )
    offered = "the key offered" if len(tried) == 1 else f"any of {_keys(len(tried))}"
    cause = f": {known[0]}" if known else ""
    message = f"{where} refuses {offered} for user {user!r}{accepts}{cause}"
    return LoginRefused(message, where=lines, hint=known[1] if known else KEYS)


def explain_more_wanted(*, where: str, methods: list[str]) -> ConnectError:
    """The error for a host that accepts the key and demands a further method, with no person present to ask."""
    return LoginRefused(
        f"{where} takes the key and wants more: {', '.join(methods)}",
        hint="run this at a terminal, where you can be asked for it",
    )


def _keys(count: int) -> str:
    return "1 key" if count == 1 else f"{count} keys"
