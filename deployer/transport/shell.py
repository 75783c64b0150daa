"""An interactive shell on a host, by Fabric, over a connection whose host key we have checked ourselves."""

from __future__ import annotations

from deployer.errors import UsageError
from deployer.transport.ask import has_terminal
from deployer.transport.fabric_ssh import FabricTransport


def open_shell(transport: FabricTransport, command: str | None = None) -> int:
    """Runs `command` (None: the login shell) with a terminal there and this one here. Returns its exit status."""
    if not has_terminal():
        raise UsageError("a shell needs a terminal", hint="use `exec … -- COMMAND` from scripts")
    transport.connect()
    import fabric
    import paramiko

    session = transport.session
    client = paramiko.SSHClient()
    client.set_missing_host_key_policy(paramiko.RejectPolicy())
    client._transport = session  # type: ignore[attr-defined]
    options = session.options
    config = fabric.Config(ssh_config=paramiko.SSHConfig())
    connection = fabric.Connection(options.hostname, user=options.user, port=options.port, config=config)
    connection.client, connection.transport = client, session
    result = connection.shell() if command is None else connection.run(command, pty=True, warn=True)
    return int(result.exited)
