"""The transport to an address: this machine's own, or SSH."""

from __future__ import annotations

from deployer.transport.protocol import Transport

WAYS = ("auto", "fabric", "openssh")
"""How to connect by SSH; `make_transport` says what they are."""


def make_transport(
    ssh: str | None,
    *,
    way: str = "auto",
    ssh_key: str | None = None,
    accept_new_host_key: bool = False,
    config_file: str | None = None,
    connect_timeout_s: float | None = None,
) -> Transport:
    """The transport to an address as typed after `--ssh`; None is this machine. An SSH connection begins at once, in
    the background; `connect` waits for it.

    `way`: `fabric` (paramiko), `openssh` (the ssh program), or `auto`, which takes openssh where the options of the
    host need it. `connect_timeout_s` bounds connecting and logging in, without the time in which a person is asked;
    unless given it is ssh_config's ConnectTimeout, or 10 s.
    """
    if ssh is None:
        from deployer.transport.local import LocalTransport

        return LocalTransport()
    from deployer.connection.ssh_way import SshTransport
    from deployer.transport.ssh.target import parse_target

    transport = SshTransport(
        parse_target(ssh),
        way=way,
        ssh_key=ssh_key,
        accept_new_host_key=accept_new_host_key,
        config_file=config_file,
        connect_timeout_s=connect_timeout_s,
    )
    transport.start_connect()
    return transport
