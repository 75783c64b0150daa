"""An interactive shell by Fabric. Imported only when it is used: Fabric takes a quarter of a second to load."""

from __future__ import annotations

import fabric
import paramiko
from fabric.runners import Remote, RemoteShell
from invoke.exceptions import UnexpectedExit

from deployer.transport.paramiko_ssh.session import Session

KEEP_ALIVE_S = 15
"""Seconds between keep-alives. Without data to send, a dead connection would never be noticed: see UNACKNOWLEDGED_S."""


class _Typing(Remote):  # type: ignore[misc]
    """Ignores input to a shell that has just ended."""

    def _write_proc_stdin(self, data: bytes) -> None:
        try:
            self.channel.sendall(data)
        except OSError:
            return


class _TypingShell(_Typing, RemoteShell):  # type: ignore[misc]
    """The same for a login shell that reads commands from a terminal."""


def run_shell(session: Session, command: str | None) -> int:
    """Runs `command` (None: the login shell) with terminals on both sides. Returns its exit status.

    Fabric gets a connection that was made here, with the host key checked: a connection made by Fabric would accept any
    key.
    """
    session.set_keepalive(int(session.options.alive_every_s) or KEEP_ALIVE_S)
    client = paramiko.SSHClient()
    client.set_missing_host_key_policy(paramiko.RejectPolicy())
    client._transport = session  # type: ignore[attr-defined]
    options = session.options
    runners = {"remote": _Typing, "remote_shell": _TypingShell}
    config = fabric.Config(ssh_config=paramiko.SSHConfig(), overrides={"runners": runners})
    connection = fabric.Connection(options.hostname, user=options.user, port=options.port, config=config)
    connection.client, connection.transport = client, session
    try:
        result = connection.shell() if command is None else connection.run(command, pty=True)
    except UnexpectedExit as error:  # any status except 0; `shell` has no option to just return it
        result = error.result
    return int(result.exited)
