"""What the ssh program says on its stderr, and why it could not connect out of that.

At LogLevel DEBUG1 its own words are kept apart from what else comes on the same pipe; a failure is told in the words
that the other transport uses too.
"""

from __future__ import annotations

import errno
import re
import socket
import threading
from collections.abc import Callable

from deployer.errors import ConnectError
from deployer.transport.ssh.attempt import HandshakeCut
from deployer.transport.ssh.explain import (
    blame_hop,
    explain_auth,
    explain_handshake,
    explain_no_way_on,
    explain_silence,
    explain_socket_error,
    explain_stalled_login,
    quote,
    without_escapes,
)
from deployer.transport.ssh.host_keys import HostKeys
from deployer.transport.ssh.ssh_config import SshOptions

MAX_LINE = 8192
_READY = r"debug1: (Entering interactive session|mux_client_request_session: master session id)"
_HOST_KEY = r"debug1: Server host key: (\S+ SHA256:\S+)"
_OFFERED = r"debug1: Offering (?:\S+ )?public key: (.+?)(?: SHA256:\S+)?( \S+)?$"
_METHODS = r"debug1: Authentications that can continue: (.*)"
_INSTEAD = r"debug1: (?:kex|ssh)_exchange_identification: (?:banner line \d+: )?(.*)"
_NO_NEWS = r"debug\d: |Authenticated to .+ (\(\[|\(via proxy\))|Transferred: sent \d+|Bytes per second: sent [\d.]+"


class SshWords:
    """Hears one ssh process; `sift` is for a Drain. `settled` is set once the process is logged in, or has ended."""

    def __init__(self, show: Callable[[str], None] | None = None) -> None:
        self.settled = threading.Event()
        self.ended = threading.Event()
        self.ready = False
        """Logged in."""
        self.connected = False
        """The TCP connection was there."""
        self.greeted = False
        """The server itself has answered, not only a hop before it."""
        self.instead = ""
        """What the server said in the place of SSH's first line."""
        self.host_key = ""
        """Type and fingerprint of the key that the server showed."""
        self.offered: list[str] = []
        self.accepted = ""
        """The last key that the server would take."""
        self.methods: list[str] = []
        self._show = show
        self._rest = b""

    def sift(self, data: bytes) -> bytes:
        """Takes what came, b"" at the end; returns what is not of ssh's own debugging."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        kept = b"".join(line + b"\n" for line in lines if self._is_news(line))
        if not data or len(self._rest) > MAX_LINE:
            last, self._rest = self._rest, b""
            kept += last if last and self._is_news(last) else b""
        if not data:
            self.ended.set()
            self.settled.set()
        return kept

    def _is_news(self, line: bytes) -> bool:
        text = line.decode("utf-8", "replace").rstrip("\r")
        if not re.match(_NO_NEWS, text):
            if self._show is not None and not self.ready:
                self._show(text)
            return True
        if not self.ready:
            self._hear(text)
        return False

    def _hear(self, text: str) -> None:
        if found := re.match(_HOST_KEY, text):
            self.host_key = found[1]
        elif found := re.match(_OFFERED, text):
            self.offered.append(found[1])
        elif found := re.match(_METHODS, text):
            self.methods = found[1].split(",")
        elif text.startswith("debug1: Server accepts key: "):
            self.accepted = self.offered[-1] if self.offered else ""
        elif found := re.match(_INSTEAD, text):
            self.instead = self.instead or found[1]
        elif text == "debug1: Connection established.":
            self.connected = True
        elif text.startswith("debug1: Authenticating to "):
            self.greeted = True
        elif re.match(_READY, text):
            self.ready = True
            self.settled.set()


# --- why it could not connect -----------------------------------------------------------------------------------------

_CUT = r"kex_exchange_identification|ssh_exchange_identification|Connection (closed|reset) by|Broken pipe|MaxStartups"
_TOO_MANY = r"MaxStartups|Not allowed at this time"
_NO_SSH = r"(?i)banner line contains invalid|no ssh identification string|Bad remote protocol version|invalid SSH ident"


class NeedsPerson(ConnectError):
    """A login that may succeed when somebody can be asked for a password, a passphrase, a PIN, or about a key."""


def explain_ssh(text: str, words: SshWords, options: SshOptions, *, asked: bool) -> ConnectError:
    """The error for an ssh process that ended before it was logged in; `text` is what it and its hops said.

    Every ssh of a chain whose way on has closed says so, so their number tells which of the hops failed. `asked`: a
    person could be asked.
    """
    said = without_escapes(text)
    parties = [options, *options.hops]
    behind = 0 if words.greeted else len(re.findall(r"(?m)^Connection closed by UNKNOWN port", said))
    number = min(behind, len(parties) - 1)
    party = parties[number]
    if number and (found := re.search(r"open failed: (?:.*?: )?(.+)", said)):
        return explain_no_way_on(found[1], hop=party, target=parties[number - 1])
    error = _explain(said, words if number == 0 else SshWords(), party, asked=asked)
    return blame_hop(error, before=parties[number - 1]) if number else error


def explain_late(words: SshWords, text: str, options: SshOptions, *, timeout_s: float) -> ConnectError:
    """The error for an ssh process that was not logged in in time."""
    if words.greeted:
        return explain_stalled_login(where=options.description, timeout_s=timeout_s)
    if options.hops:
        return ConnectError(
            f"there was no way to {options.description} by its jump hosts within {timeout_s:g} s",
            where=quote(without_escapes(text)),
            hint="try `ssh` to each of them alone; --connect-timeout waits longer",
        )
    if not words.connected and options.proxy_command is None:
        return explain_socket_error(TimeoutError(), host=options.hostname, port=options.port, timeout_s=timeout_s)
    return explain_silence(where=options.description, timeout_s=timeout_s)


def _explain(said: str, words: SshWords, party: SshOptions, *, asked: bool) -> ConnectError:
    where = party.description
    if found := re.search(r"Could not resolve hostname (\S+): (.*)", said):
        error = socket.gaierror(socket.EAI_NONAME, found[2].strip())
        return explain_socket_error(error, host=found[1], port=party.port, timeout_s=party.connect_timeout_s)
    if found := re.search(r"connect to (?:host|address) (\S+) port \d+: (.*)", said):
        return explain_socket_error(
            _socket_error(found[2].strip()), host=found[1], port=party.port, timeout_s=party.connect_timeout_s
        )
    if re.search(r"(?i)timed out|timeout", said):
        return explain_silence(where=where, timeout_s=party.connect_timeout_s)
    if "Host key verification failed" in said or re.search(r"(?i)\brevoked\b", said):
        return _explain_host_key(said, words, party, asked=asked)
    if (found := re.search(r"Permission denied \(([^)]*)\)", said)) or "Too many authentication failures" in said:
        return _explain_refusal(said, words, party, methods=found[1].split(",") if found else words.methods)
    if found := re.search(r"Unable to negotiate .*?: (.*)", said):
        return explain_handshake(f"Incompatible: {found[1]}", where=where)
    if re.search(_NO_SSH, said) or (words.instead and not words.greeted and not re.search(_TOO_MANY, words.instead)):
        return explain_handshake("Invalid SSH banner", where=where)
    own = [line for line in said.splitlines() if line.strip() and not re.search(_CUT, line)]
    if re.search(_CUT, said) and not (party.proxy_command and own):
        if words.methods:
            return ConnectError(f"{where} closed the connection during the login", where=quote(said))
        cut = explain_handshake("end of stream", where=where)
        return HandshakeCut(cut.message, where=cut.where, hint=cut.hint)
    return ConnectError(f"ssh could not connect to {where}", where=quote(said), hint="try `ssh` by hand")


def _socket_error(reason: str) -> OSError:
    if "refused" in reason:
        return ConnectionRefusedError()
    if "timed out" in reason:
        return TimeoutError()
    unreachable = "No route" in reason or "unreachable" in reason
    return OSError(errno.EHOSTUNREACH if unreachable else errno.EIO, reason)


def _explain_host_key(said: str, words: SshWords, party: SshOptions, *, asked: bool) -> ConnectError:
    keys = HostKeys(party)
    shown = words.host_key
    if found := re.search(r"fingerprint for the (\S+) key sent by the remote host is\s+(SHA256:[^\s.]+)", said):
        shown = shown or f"{found[1]} {found[2]}"
    changed = "IDENTIFICATION HAS CHANGED" in said
    if not changed and re.search(r"(?i)\brevoked\b", said):
        return ConnectError(
            f"the key of {keys.name} is marked as revoked: {shown}",
            where=quote(said),
            hint="do not connect: somebody may have got hold of this key",
        )
    if asked and not changed:
        return ConnectError(f"the host key of {keys.name} was not accepted")
    error = keys.refusal(shown or "(ssh does not say which)", changed=changed)
    return error if changed or party.strict_host_key == "yes" else NeedsPerson(error.message, hint=error.hint)


def _explain_refusal(said: str, words: SshWords, party: SshOptions, *, methods: list[str]) -> ConnectError:
    if words.accepted:
        return NeedsPerson(
            f"{party.description} would take the key {words.accepted}, but it could not be used",
            hint="it has a passphrase or needs a PIN: unlock it with ssh-add, or run this at a terminal",
        )
    banner = "\n".join(line for line in said.splitlines() if "Permission denied" not in line)
    error = explain_auth(
        words.offered, [], where=party.description, user=party.user, methods=methods, banner=banner.strip()
    )
    return NeedsPerson(error.message, where=error.where, hint=error.hint)
