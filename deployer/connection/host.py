"""A host as the user named it: opens links to it, over one connection that is made again when it broke."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from deployer.connection.choose import make_transport
from deployer.errors import UsageError
from deployer.transport.protocol import Transport

if TYPE_CHECKING:
    from deployer.connection.link import Link
    from deployer.connection.ssh_way import SshTransport

HERE = "this machine"


@dataclass
class Host:
    """Where jobs run. `prefetch` begins to connect while other work goes on; `connect` opens a link."""

    ssh: str | None
    root: str
    ssh_key: str | None = None
    accept_new_host_key: bool = False
    transport: str = "auto"
    """`auto`, `fabric` or `openssh`."""
    connect_timeout_s: float | None = None
    _transport: Transport | None = field(default=None, repr=False)
    _link: Link | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not self.root.startswith(("/", "~")):
            raise UsageError(
                f"the remote root {self.root!r} is a relative path", hint="begin it with / or ~ (the home on the host)"
            )

    @property
    def name(self) -> str:
        return self.ssh or HERE

    def prefetch(self) -> None:
        """Begins to connect in the background."""
        if self._transport is None:
            self._transport = self._make_transport()

    def load(self) -> None:
        """After `prefetch`, before work that can wait: see SshTransport."""
        if self.ssh is not None:
            import deployer.connection.link  # noqa: F401  # needed whatever ssh says of its configuration, which takes a moment

            self._ssh_transport().load()

    def connect(self, *, request: dict[str, Any] | None = None, **more: Any) -> Link:
        """A link with its first request under way, and `more` as Link.open takes it. ConnectError, or the host's own
        refusal from the call."""
        from deployer.connection.link import Link  # the connection begins before this is loaded

        if self._link is not None and self._link.lost and self._transport is not None:
            self._transport.close()  # it may not have noticed yet that it is dead
            self._transport = None
        self.prefetch()
        assert self._transport is not None
        self._link = Link.open(self._transport, root=self.root, request=request, **more)
        return self._link

    def run_shell(self, command: str | None) -> int:
        """Runs `command` (None: the login shell) with a terminal there and this one here. Returns its exit status."""
        transport = self._ssh_transport()
        try:
            return transport.run_shell(command)
        finally:
            transport.close()

    def at(self, ssh: str | None, root: str) -> Host:
        """Another place, entered in the same way."""
        return Host(ssh, root, self.ssh_key, self.accept_new_host_key, self.transport, self.connect_timeout_s)

    def dial(self) -> float:
        """Connects unless connected, and returns the seconds that it took. ConnectError with a hint."""
        begun = time.monotonic()
        self.prefetch()
        assert self._transport is not None
        self._transport.connect()
        return time.monotonic() - begun

    def close(self) -> None:
        """Ends the connection, if there is one; jobs stay."""
        if self._link is not None:
            self._link.close()
        if self._transport is not None:
            self._transport.close()
        self._link = self._transport = None

    def _ssh_transport(self) -> SshTransport:
        from deployer.connection.ssh_way import SshTransport

        self.prefetch()
        assert isinstance(self._transport, SshTransport)
        return self._transport

    def _make_transport(self) -> Transport:
        return make_transport(
            self.ssh,
            way=self.transport,
            ssh_key=self.ssh_key,
            accept_new_host_key=self.accept_new_host_key,
            connect_timeout_s=self.connect_timeout_s,
        )
