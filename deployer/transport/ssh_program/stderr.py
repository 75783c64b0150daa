"""Reads the ssh program's stderr, and finds in it why ssh could not connect.

At LogLevel DEBUG1, ssh's own lines are separated from other output on the same pipe. A failure gets the same messages
as in the other transport.
"""

from __future__ import annotations

import errno
import re
import socket
import threading
from collections.abc import Callable

from deployer.errors import ConnectError, HostKeyError, LoginRefused
from deployer.transport.ssh.causes import TOO_MANY_KEYS
from deployer.transport.ssh.explain import (
    HEARD_LINES,
    blame_hop,
    explain_auth,
    explain_cut,
    explain_cut_login,
    explain_incompatible,
    explain_more_wanted,
    explain_no_greeting,
    explain_no_way_on,
    explain_old_protocol,
    explain_proxy_ended,
    explain_silence,
    explain_socket_error,
    explain_stalled_login,
    quote,
    without_escapes,
)
from deployer.transport.ssh.host_keys import HostKeys
from deployer.transport.ssh.key_files import UnusableKey, agent_trouble, check_key_file, key_label
from deployer.transport.ssh.ssh_config import SshOptions

MAX_LINE = 8192
_READY = r"debug1: (Entering interactive session|mux_client_request_session: master session id)"
_HOST_KEY = r"debug1: Server host key: (\S+ SHA256:\S+)"
_OFFERED = r"debug1: Offering public key: (.+) (\S+) SHA256:\S+((?: \w+)*)$"
_OFFERED_EARLIER = r"debug1: Offering public key: (\S+) SHA256:\S+ (.+)$"  # before OpenSSH 8
_METHODS = r"debug1: Authentications that can continue: (.*)"
_INSTEAD = r"debug1: (?:kex|ssh)_exchange_identification: (?!write: )(?:banner line \d+: )?(.*)"
_NO_NEWS = (
    r"Authenticated using |debug\d: |Authenticated to .+ (\(\[|\(via proxy\))"
    r"|Transferred: sent \d+|Bytes per second: sent [\d.]+"
)


class SshWords:
    """Parses the stderr of one ssh process; `sift` is for a Drain. `settled` is set when the process has logged in or
    ended."""

    def __init__(self, show: Callable[[str], None] | None = None) -> None:
        self.settled = threading.Event()
        self.ended = threading.Event()
        self.ready = False
        """ssh has logged in."""
        self.connected = False
        """The TCP connection was made."""
        self.greeted = False
        """The target server itself has answered, not only a jump host."""
        self.instead: list[str] = []
        """The lines that the server sent in place of SSH's first line."""
        self.partly = False
        """The server accepted a key, but demands another method too."""
        self.host_key = ""
        """Type and fingerprint of the server's host key."""
        self.offered: list[tuple[str, str, bool]] = []
        """For each offered key: name, type as ssh shows it, and whether it comes from the agent."""
        self.accepted = ""
        """The last key that the server would accept."""
        self.methods: list[str] = []
        self._show = show
        self._rest = b""

    def sift(self, data: bytes) -> bytes:
        """Takes new output, b"" at the end; returns the part that is not ssh's own debug output."""
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
        if text.startswith("Authenticated using ") and text.endswith("with partial success."):
            self.partly = True
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
            self.offered.append((found[1], found[2], "agent" in found[3].split()))
        elif found := re.match(_OFFERED_EARLIER, text):
            self.offered.append((found[2], found[1], False))
        elif found := re.match(_METHODS, text):
            self.methods = found[1].split(",")
        elif text.startswith("debug1: Server accepts key: "):
            self.accepted = self.offered[-1][0] if self.offered else ""
        elif found := re.match(_INSTEAD, text):
            if len(self.instead) < HEARD_LINES:
                self.instead.append(found[1])
        elif text == "debug1: Connection established.":
            self.connected = True
        elif text.startswith("debug1: Authenticating to "):
            self.greeted = True
        elif re.match(_READY, text):
            self.ready = True
            self.settled.set()


# --- why it could not connect -----------------------------------------------------------------------------------------

_CUT = r"kex_exchange_identification|ssh_exchange_identification|Connection (closed|reset) by|Broken pipe|MaxStartups"
_NO_SSH = r"banner line contains invalid|[Nn]o ssh identification string|Bad remote protocol version|nvalid SSH ident"
_OWN = (
    rf"{_CUT}|Permission denied \(|Load key |Received disconnect from|Disconnected from|@{{10}}|^@ +WARNING"
    r"|^Permissions \d|^It is required that your private|^This private key will be ignored"
    r"|sign_and_send_pubkey|no such identity: |Warning: Permanently added"
)
"""Lines of ssh itself, not of the server or a ProxyCommand."""
_MISMATCH = r"Unable to negotiate .*?: no matching (.+?)(?: (?:method|type))? found\. Their offer: (\S+)"
_KINDS = {"key exchange": "key exchange method", "host key": "host key type", "cipher": "cipher", "MAC": "MAC"}


def _foreign(said: str) -> str:
    """Text that is not from ssh itself: a server's banner, its reason to hang up, a ProxyCommand's error."""
    lines = [line for line in said.splitlines() if line.strip() and not re.search(_OWN, line)]
    goodbyes = re.findall(r"(?m)^Received disconnect from .*?:\d+: (.*)$", said)
    return "\n".join([*lines, *goodbyes])


class NeedsPerson(LoginRefused):
    """A login that may succeed if a person can be asked for a password, a passphrase or a PIN, or about a key."""


class UnknownKey(NeedsPerson, HostKeyError):
    """The host's key is not known, and a person could be asked about it."""

    code = HostKeyError.code


class HopFailed(ConnectError):
    """A jump host failed. ssh reports less about it than about the target, so a connection to it alone finds the
    reason."""

    hop: SshOptions
    before: SshOptions


def explain_ssh(text: str, words: SshWords, options: SshOptions, *, asked: bool) -> ConnectError:
    """The error for an ssh process that ended before it had logged in; `text`: output of the process and its hops.

    Each ssh of a chain prints a line when its onward connection has closed, so the number of lines shows which hop
    failed. `asked`: a person could be asked.
    """
    said = without_escapes(text)
    parties = [options, *options.hops]
    behind = 0 if words.greeted else len(re.findall(r"(?m)^Connection closed by UNKNOWN port", said))
    number = min(behind, len(parties) - 1)
    party = parties[number]
    if number and (found := re.search(r"open failed: (?:[\w ]+: )?(.+)", said)):
        return explain_no_way_on(found[1], hop=party, target=parties[number - 1])
    if number:
        before = parties[number - 1]
        error = blame_hop(_explain(said, SshWords(), party, asked=asked), before=before)
        failed = HopFailed(error.message, where=error.where, hint=error.hint)
        failed.hop, failed.before = party, before
        return failed
    return _explain(said, words, party, asked=asked)


def explain_late(words: SshWords, text: str, options: SshOptions, *, timeout_s: float) -> ConnectError:
    """The error for an ssh process that did not log in in time."""
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
    proxied, beside = options.proxy_command is not None, _foreign(without_escapes(text))
    return explain_silence(where=options.description, timeout_s=timeout_s, proxied=proxied, beside=beside)


def _explain(said: str, words: SshWords, party: SshOptions, *, asked: bool) -> ConnectError:
    where = party.description
    if found := re.search(r"Could not resolve hostname (\S+): (.*)", said):
        error = socket.gaierror(socket.EAI_NONAME, found[2].strip())
        return explain_socket_error(error, host=found[1], port=party.port, timeout_s=party.connect_timeout_s)
    if found := re.search(r"connect to (?:host|address) (\S+) port \d+: (.*)", said):
        return explain_socket_error(
            _socket_error(found[2].strip()), host=found[1], port=party.port, timeout_s=party.connect_timeout_s
        )
    foreign, proxied = _foreign(said), party.proxy_command is not None
    if not proxied and re.search(r"(?i)timed out|timeout", said):
        return explain_silence(where=where, timeout_s=party.connect_timeout_s)
    if "Host key verification failed" in said or re.search(r"(?i)\brevoked\b", said):
        return _explain_host_key(said, words, party, asked=asked)
    if (found := re.search(r"Permission denied \(([^)]*)\)", said)) or re.search(TOO_MANY_KEYS, said):
        methods = found[1].split(",") if found else words.methods
        return _explain_refusal(foreign, words, party, methods=methods)
    if found := re.search(_MISMATCH, said):
        return explain_incompatible(_KINDS.get(found[1], found[1]), found[2], where=where)
    if "Protocol major versions differ" in said:
        return explain_old_protocol(where=where)
    if words.greeted and re.search(_CUT, said):
        if words.methods:
            return explain_cut_login(where=where, said=foreign)
        return explain_proxy_ended(foreign, where=where) if proxied else explain_cut(where=where, said=foreign)
    if re.search(f"{_CUT}|{_NO_SSH}", said) and not words.greeted:
        heard = words.instead or (["?"] if re.search(_NO_SSH, said) else [])
        return explain_no_greeting(where=where, heard=heard, proxied=proxied, beside=foreign)
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
        return keys.revoked(shown)
    if asked and not changed:
        return HostKeyError(f"the host key of {keys.name} was not accepted")
    error = keys.refusal(shown or "(ssh does not say which)", changed=changed)
    return error if changed or party.strict_host_key == "yes" else UnknownKey(error.message, hint=error.hint)


def _explain_refusal(foreign: str, words: SshWords, party: SshOptions, *, methods: list[str]) -> ConnectError:
    where = party.description
    if words.partly:
        error = explain_more_wanted(where=where, methods=methods)
        return NeedsPerson(error.message, hint=error.hint)
    unusable = _unusable_files(party, held=[name for name, _, from_agent in words.offered if from_agent])
    if words.accepted and words.accepted not in unusable:
        return NeedsPerson(
            f"{where} would take the key {words.accepted}, but it could not be used",
            hint="it needs a PIN, or the agent refuses it: unlock it with ssh-add, or run this at a terminal",
        )
    offered = [key_label(name, kind, from_agent=of) for name, kind, of in words.offered if of or name not in unusable]
    skipped = _trouble_with_agent(party) + [f"{name} ({reason})" for name, reason in unusable.items()]
    error = explain_auth(offered, skipped, where=where, user=party.user, methods=methods, said=foreign)
    return NeedsPerson(error.message, where=error.where, hint=error.hint)


def _unusable_files(party: SshOptions, *, held: list[str]) -> dict[str, str]:
    """Identity files whose key ssh could not offer without a person, with the reason; `held`: names of keys that the
    agent has."""
    reasons = {}
    for path in party.identity_files:
        if path.is_file() and str(path) not in held:
            try:
                check_key_file(path)
            except UnusableKey as error:
                reasons[str(path)] = str(error)
    return reasons


def _trouble_with_agent(party: SshOptions) -> list[str]:
    """Why the agent cannot be reached."""
    if party.identity_agent is None:
        return []
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(party.identity_agent)
    except OSError as error:
        return [agent_trouble(party.identity_agent, error)]
    return []
