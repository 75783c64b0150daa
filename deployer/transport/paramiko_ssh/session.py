"""One authenticated SSH connection: paramiko's protocol engine with our sockets, keys, host-key rules and deadlines."""

from __future__ import annotations

import re
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import paramiko
from paramiko.auth_handler import AuthHandler
from paramiko.common import MSG_CHANNEL_OPEN_FAILURE, cMSG_SERVICE_REQUEST

from deployer.errors import ConnectError
from deployer.printable import shown
from deployer.terminal import ask_secret
from deployer.transport.paramiko_ssh.keys import Candidate, Keyring, find_keys, may_ask_early, note_key
from deployer.transport.paramiko_ssh.sockets import CLIENT_VERSION
from deployer.transport.ssh.attempt import Ask, Deadline, has_terminal
from deployer.transport.ssh.causes import TOO_MANY_KEYS
from deployer.transport.ssh.explain import (
    explain_auth,
    explain_broken_handshake,
    explain_cut,
    explain_cut_login,
    explain_incompatible,
    explain_more_wanted,
    explain_no_greeting,
    explain_old_protocol,
    explain_proxy_ended,
    explain_silence,
    explain_stalled_login,
    without_escapes,
)
from deployer.transport.ssh.host_keys import HostKeys
from deployer.transport.ssh.key_files import UnusableKey
from deployer.transport.ssh.ssh_config import SshOptions

WINDOW_BYTES = 4 << 20
"""Bytes that the host may send before we answer. Larger windows made downloads slower, twice, on loopback."""
OPEN_TIMEOUT_S = 60.0
AUTH_TIMEOUT_S = 30.0
PERSON_TIMEOUT_S = 300.0
"""Seconds for a step in which a person may have to find a passphrase, a password or a security token."""
PASSWORD_TRIES = 3
FAST_CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com")


class EagerAuth(AuthHandler):
    """Authentication that does not wait for SERVICE_ACCEPT, which saves two round trips with the first key.

    RFC 4252 lets a client send the request directly after the service request; both arrive in order.
    """

    methods: Sequence[str] = ()
    """The methods that the server would accept, after a refusal."""

    def _request_auth(self) -> None:
        session: Any = self.transport
        if not session.service_requested:
            session.service_requested = True
            request = paramiko.Message()
            request.add_byte(cMSG_SERVICE_REQUEST)
            request.add_string("ssh-userauth")
            session._send_message(request)
        accept = paramiko.Message()
        accept.add_string("ssh-userauth")
        accept.rewind()
        super()._parse_service_accept(accept)  # type: ignore[misc]  # builds, signs and sends the request

    def _parse_service_accept(self, m: paramiko.Message) -> None:
        """Ignores the server's acceptance: the request was sent without it."""

    def _parse_userauth_banner(self, m: paramiko.Message) -> None:
        self.transport.said += m.get_text() + "\n"  # type: ignore[attr-defined]

    def _parse_userauth_failure(self, m: paramiko.Message) -> None:
        self.methods = m.get_list()
        m.rewind()
        super()._parse_userauth_failure(m)  # type: ignore[misc]


class Session(paramiko.Transport):
    """A connection to one host. Made by `open_session_to`."""

    def __init__(self, sock: Any, options: SshOptions, host_keys: HostKeys) -> None:
        super().__init__(sock, default_window_size=WINDOW_BYTES)
        self.local_version = CLIENT_VERSION
        self.options = options
        self.service_requested = False
        self.partly = False
        """The server accepted a key, but demands another method too."""
        self.said = self.goodbye = ""
        self.proxy: subprocess.Popen[bytes] | None = None
        self.hop: Session | None = None
        self._handler_table[MSG_CHANNEL_OPEN_FAILURE] = self._note_no_channel  # type: ignore[attr-defined]
        self.no_channel = ""
        """The server's reason for not opening a channel."""
        self.offers: dict[str, Any] = {}
        """The server's algorithms, by paramiko's names for their kinds."""
        self.early: EarlyChannel | None = None
        """The first channel, if it was requested together with the login."""
        defaults: Any = paramiko.Transport
        self._preferred_keys = order_key_types(defaults._preferred_keys, host_keys.types)
        gcm = tuple(name for name in FAST_CIPHERS if name in defaults._cipher_info)
        self._preferred_ciphers = (*gcm, *(name for name in defaults._preferred_ciphers if name not in gcm))

    @property
    def preferred_keys(self) -> tuple[str, ...]:
        """Host-key types without certificates: `@cert-authority` lines are not used."""
        return tuple(self._preferred_keys)

    def _note_no_channel(self, m: paramiko.Message) -> None:
        """Keeps the server's reason: paramiko reports only the meaning of the error number."""
        m.get_int()
        m.get_int()
        self.no_channel = m.get_text()
        m.rewind()
        self._parse_channel_open_failure(m)  # type: ignore[attr-defined]

    def _really_parse_kex_init(self, m: paramiko.Message, **more: Any) -> Any:
        self.offers = super()._really_parse_kex_init(m, **more)  # type: ignore[misc]
        return self.offers

    def close(self) -> None:
        """Ends the connection, the jump hosts before it, and a ProxyCommand."""
        super().close()
        if self.hop is not None:
            self.hop.close()
        if self.proxy is not None and self.proxy.poll() is None:
            self.proxy.terminate()

    def _parse_disconnect(self, m: paramiko.Message) -> None:
        m.get_int()
        self.goodbye = m.get_text()


class EarlyChannel:
    """The first channel of a connection, requested together with the login instead of after it: one round trip less.

    A server may not accept this request before the login has succeeded (RFC 4252). OpenSSH's server reads it after it
    has accepted the login, and answers UNIMPLEMENTED after a refusal. So this is used with OpenSSH only, and with the
    key that succeeded the last time. The channel is opened in the background.
    """

    def __init__(self, session: paramiko.Transport) -> None:
        self._session = session
        self._settled = threading.Event()
        self._channel: paramiko.Channel | None = None
        self._error: Exception | None = None
        # after a refused login no answer comes, and no thread waits for this one
        threading.Thread(target=self._open, name="ssh-early-channel", daemon=True).start()

    def _open(self) -> None:
        try:
            self._channel = self._session.open_session(timeout=OPEN_TIMEOUT_S)
        except Exception as error:  # passed on to the caller of `take`
            self._error = error
        self._settled.set()

    def take(self) -> paramiko.Channel:
        """The channel. Raises the error of `open_session`."""
        self._settled.wait()
        if self._error is not None:
            raise self._error
        assert self._channel is not None
        return self._channel


_KINDS = {
    "acceptable kex": ("key exchange method", "kex_algo_list"),
    "acceptable host key": ("host key type", "server_key_algo_list"),
    "acceptable cipher": ("cipher", "server_encrypt_algo_list"),
    "acceptable mac": ("MAC", "server_mac_algo_list"),
}
"""paramiko's words for a missing common algorithm -> our words, and the message field with the server's algorithms."""


def order_key_types(default: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    """Host-key algorithms, those of the known key types first."""
    first = [name for kind in known for name in (("rsa-sha2-512", "rsa-sha2-256") if kind == "ssh-rsa" else (kind,))]
    wanted = [name for name in dict.fromkeys(first) if name in default]
    return (*wanted, *(name for name in default if name not in wanted))


# --- connecting -------------------------------------------------------------------------------------------------------


def open_session_to(
    options: SshOptions, sock: Any, *, deadline: Deadline, accept_new: bool, ask: Ask, wants_channel: bool = False
) -> Session:
    """An authenticated connection through a pipe to the server. Checks its host key before sending it any secret.

    wants_channel: a channel will be opened at once, so it may be requested together with the login (EarlyChannel).
    Raises ConnectError with a hint, or HandshakeCut if the server hung up during the handshake.
    """
    person = deadline.pausing(ask) if has_terminal() and not options.batch_mode else None
    host_keys = HostKeys(options)
    session = Session(sock, options, host_keys)
    try:
        _shake_hands(session, deadline)
        key = session.get_remote_server_key()
        host_keys.check(key.get_name(), key.asbytes(), accept_new=accept_new, ask=person)
        _log_in(session, find_keys(options, person), deadline=deadline, ask=person, wants_channel=wants_channel)
    except BaseException:
        session.close()
        raise
    return session


def _shake_hands(session: Session, deadline: Deadline) -> None:
    timeout_s = max(1.0, deadline.left_s)
    begun = time.monotonic()
    session.banner_timeout = session.handshake_timeout = timeout_s
    done = threading.Event()
    session.start_client(event=done)
    done.wait(timeout_s)
    if session.is_active() and session.initial_kex_done:
        return
    options = session.options
    where, proxied = options.description, options.proxy_command is not None
    heard, beside = getattr(session.sock, "heard", b""), getattr(session.sock, "beside", str)
    if time.monotonic() - begun > 0.9 * timeout_s:
        raise explain_silence(where=where, timeout_s=options.connect_timeout_s, proxied=proxied, beside=beside())
    if not session.remote_version:
        lines = heard.decode("utf-8", "replace").splitlines()
        raise explain_no_greeting(where=where, heard=lines, proxied=proxied, beside=beside())
    failure = session.get_exception()
    error = str(failure) if isinstance(failure, paramiko.SSHException) else ""
    for words, (kind, offers) in _KINDS.items():
        if words in error:
            raise explain_incompatible(kind, ",".join(session.offers[offers]), where=where)
    if not session.remote_version.startswith(("SSH-2.", "SSH-1.99")):
        raise explain_old_protocol(where=where)
    if failure is not None and error and not isinstance(failure.__context__, (EOFError, OSError)):
        raise explain_broken_handshake(session.goodbye or error, where=where)
    if proxied:
        raise explain_proxy_ended(session.goodbye or beside(), where=where)
    raise explain_cut(where=where, said=session.goodbye)


# --- logging in -------------------------------------------------------------------------------------------------------


def _log_in(session: Session, keyring: Keyring, *, deadline: Deadline, ask: Ask | None, wants_channel: bool) -> None:
    tried: list[str] = []
    skipped = list(keyring.skipped)
    methods: Sequence[str] = ()
    for candidate in keyring.candidates:
        # with a person present, the agent may ask for a confirmation
        session.auth_timeout = AUTH_TIMEOUT_S if candidate.from_agent and ask is not None else max(1.0, deadline.left_s)
        methods = _try_key(session, candidate, tried, skipped, wants_channel=wants_channel)
        wants_channel = False
        if session.is_authenticated():
            return
        if session.goodbye:
            raise _refused(session, tried, skipped, ())
        if not deadline.left_s:
            raise explain_stalled_login(where=session.options.description, timeout_s=deadline.timeout_s)
        if methods and "publickey" not in methods:
            break
    if not tried:  # no key was offered, so the server was not asked yet
        methods = _ask_methods(session)
        if session.is_authenticated():
            return
    if ask is not None and session.options.password_auth and _try_password(session, methods, ask=ask):
        return
    raise _refused(session, tried, skipped, methods)


def _refused(session: Session, tried: list[str], skipped: list[str], methods: Sequence[str]) -> ConnectError:
    said = without_escapes(session.said + session.goodbye).strip()
    options = session.options
    where = options.description
    if session.partly:
        return explain_more_wanted(where=where, methods=list(methods))
    if not methods and not re.search(TOO_MANY_KEYS, said) and not session.is_active():
        return explain_cut_login(where=where, said=said)
    return explain_auth(tried, skipped, where=where, user=options.user, methods=list(methods), said=said)


def _authenticate(session: Session, start: Callable[[EagerAuth, threading.Event], None]) -> EagerAuth:
    """Runs one attempt to its end. After a refusal, the handler has the methods that the server would accept."""
    done = threading.Event()
    handler = EagerAuth(session)
    session.auth_handler = handler
    try:
        start(handler, done)
        if more := handler.wait_for_response(done):
            handler.methods, session.partly = more, True
    except paramiko.AuthenticationException:
        pass
    return handler


def _ask_methods(session: Session) -> Sequence[str]:
    """The methods that the server would accept. The server may also accept this login, which offers nothing."""
    try:
        return _authenticate(session, lambda handler, done: handler.auth_none(session.options.user, done)).methods
    except (paramiko.SSHException, EOFError, OSError):
        raise _refused(session, [], [], ()) from None


def _try_key(
    session: Session, candidate: Candidate, tried: list[str], skipped: list[str], *, wants_channel: bool
) -> Sequence[str]:
    """Offers one key. Returns the methods that the server lists after a refusal."""
    options = session.options
    try:
        key = candidate.load()
        tried.append(candidate.label)
        early = wants_channel and may_ask_early(session, options, key)

        def offer(handler: EagerAuth, done: threading.Event) -> None:
            handler.auth_publickey(options.user, key, done)
            if early:
                session.early = EarlyChannel(session)

        methods = _authenticate(session, offer).methods
        if not session.is_authenticated():
            session.early = None
        elif wants_channel and not early:
            note_key(options, key)
        return methods
    except (UnusableKey, paramiko.SSHException, EOFError, OSError) as error:
        if not session.is_active():
            raise _refused(session, tried, skipped, ()) from None
        skipped.append(f"{candidate.label} ({error})")
        return ()


def _try_password(session: Session, methods: Sequence[str], *, ask: Ask) -> bool:
    """Asks the person up to three times for a password, or for the answers to the server's questions."""
    options = session.options
    session.auth_timeout = PERSON_TIMEOUT_S

    def reply(title: str, instructions: str, prompts: list[tuple[str, bool]]) -> list[str]:
        texts = [shown(f"{options.description}: {without_escapes(text)}") for text, _ in prompts]
        return [ask(partial(ask_secret, text)) for text in texts]

    def with_password(handler: EagerAuth, done: threading.Event) -> None:
        handler.auth_password(
            options.user, ask(lambda: ask_secret(shown(f"Password of {options.description}: "))), done
        )

    def with_dialogue(handler: EagerAuth, done: threading.Event) -> None:
        handler.auth_interactive(options.user, reply, done)

    for _ in range(PASSWORD_TRIES):
        start = with_dialogue if "keyboard-interactive" in methods else with_password
        if not session.is_active() or not {"keyboard-interactive", "password"} & set(methods):
            break
        if not session.is_authenticated():
            methods = _authenticate(session, start).methods
    return session.is_authenticated()
