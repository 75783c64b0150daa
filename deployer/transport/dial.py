"""From options to an authenticated connection: directly, by jump hosts, or by a ProxyCommand; again when cut off."""

from __future__ import annotations

import random
import time
from typing import Any

import paramiko

from deployer.errors import ConnectError
from deployer.target import SshOptions
from deployer.transport.session import Ask, HandshakeCut, Session, open_session_to
from deployer.transport.sockets import SshSocket, connect_tcp, start_proxy

ATTEMPTS = 6
FIRST_WAIT_S = 0.25
"""Waits double from here. A server at its MaxStartups drops connections at random, so all clients wait random times."""


class Tunnel:
    """A channel of a jump host in the place of a socket."""

    def __init__(self, channel: paramiko.Channel) -> None:
        self._channel = channel
        self.last_heard = time.monotonic()

    def recv(self, size: int) -> bytes:
        data = self._channel.recv(size)
        self.last_heard = time.monotonic()
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)


def dial(options: SshOptions, *, accept_new: bool, ask: Ask, sock: SshSocket | None = None) -> Session:
    """An authenticated connection; `sock` is already connected, for the first attempt. ConnectError names the hop."""
    for attempt in range(ATTEMPTS):
        try:
            return _dial_once(options, accept_new=accept_new, ask=ask, sock=sock)
        except HandshakeCut:
            if attempt == ATTEMPTS - 1:
                raise
            sock = None
            time.sleep(FIRST_WAIT_S * 2**attempt * random.uniform(0.5, 1.5))
    raise AssertionError("unreachable")


def _dial_once(options: SshOptions, *, accept_new: bool, ask: Ask, sock: SshSocket | None) -> Session:
    begun = time.monotonic()
    pipe: Any = sock
    hop, proxy = None, None
    if sock is None and options.jump is not None:
        hop = _dial_hop(options.jump, options, accept_new=accept_new, ask=ask)
        begun = time.monotonic()
        pipe = _open_tunnel(hop, options)
    elif sock is None and options.proxy_command is not None:
        pipe, proxy = start_proxy(options.proxy_command)
    elif sock is None:
        pipe = connect_tcp(options, timeout_s=options.connect_timeout_s)
    left_s = max(1.0, options.connect_timeout_s - (time.monotonic() - begun))
    try:
        session = open_session_to(options, pipe, timeout_s=left_s, accept_new=accept_new, ask=ask)
    except BaseException:
        if hop is not None:
            hop.close()
        if proxy is not None:
            proxy.kill()
        raise
    session.hop, session.proxy = hop, proxy
    return session


def _dial_hop(jump: SshOptions, options: SshOptions, *, accept_new: bool, ask: Ask) -> Session:
    try:
        return dial(jump, accept_new=accept_new, ask=ask)
    except HandshakeCut:
        raise
    except ConnectError as error:
        message = f"the jump host before {options.hostname} failed: {error.message}"
        raise ConnectError(message, where=error.where, hint=error.hint) from None


def _open_tunnel(hop: Session, options: SshOptions) -> Tunnel:
    try:
        address = (options.hostname, options.port)
        channel = hop.open_channel("direct-tcpip", address, ("127.0.0.1", 0), timeout=options.connect_timeout_s)
    except (paramiko.SSHException, EOFError, OSError) as error:
        hop.close()
        reason = getattr(error, "text", "") or str(error)
        raise ConnectError(
            f"the jump host {hop.options.description} cannot reach {options.hostname}:{options.port}: {reason}",
            hint="the address is looked up on the jump host; AllowTcpForwarding may be off there",
        ) from None
    return Tunnel(channel)
