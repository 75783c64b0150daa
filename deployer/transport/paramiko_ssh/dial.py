"""Makes an authenticated connection from options: directly, through jump hosts, or by a ProxyCommand. Tries again after
a cut handshake."""

from __future__ import annotations

from typing import Any

import paramiko

from deployer.errors import ConnectError
from deployer.transport.paramiko_ssh.session import Session, open_session_to
from deployer.transport.paramiko_ssh.sockets import SshSocket, connect_tcp, start_proxy
from deployer.transport.ssh.attempt import Ask, Deadline, retry_cuts
from deployer.transport.ssh.explain import blame_hop, explain_no_way_on
from deployer.transport.ssh.ssh_config import SshOptions

Begun = tuple[SshSocket, Deadline]
"""A connected socket, and the time left to log in."""


def dial(
    options: SshOptions, *, accept_new: bool, ask: Ask, begun: Begun | None = None, wants_channel: bool = False
) -> Session:
    """An authenticated connection. `begun`: the socket of the first attempt. Raises ConnectError, which names the hop.

    wants_channel: see `open_session_to`.
    """
    begins = [begun] if begun is not None else []

    def connect() -> Session:
        first = begins.pop() if begins else None
        return _dial_once(options, accept_new=accept_new, ask=ask, begun=first, wants_channel=wants_channel)

    return retry_cuts(connect)


def _dial_once(options: SshOptions, *, accept_new: bool, ask: Ask, begun: Begun | None, wants_channel: bool) -> Session:
    pipe: Any = None
    hop, proxy = None, None
    if begun is None and options.jump is not None:
        hop = _dial_hop(options.jump, options, accept_new=accept_new, ask=ask)
        pipe = _open_tunnel(hop, options)
    deadline = Deadline(options.connect_timeout_s)
    if begun is not None:
        pipe, deadline = begun
    if pipe is None and options.proxy_command is not None:
        pipe, proxy = start_proxy(options.proxy_command)
    elif pipe is None:
        pipe = connect_tcp(options, timeout_s=options.connect_timeout_s)
    try:
        session = open_session_to(
            options, pipe, deadline=deadline, accept_new=accept_new, ask=ask, wants_channel=wants_channel
        )
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
    except ConnectError as error:
        raise blame_hop(error, before=options) from None


def _open_tunnel(hop: Session, options: SshOptions) -> paramiko.Channel:
    try:
        address = (options.hostname, options.port)
        return hop.open_channel("direct-tcpip", address, ("127.0.0.1", 0), timeout=options.connect_timeout_s)
    except (paramiko.SSHException, EOFError, OSError) as error:
        hop.close()
        reason = hop.no_channel or str(error)
        raise explain_no_way_on(reason, hop=hop.options, target=options) from None
