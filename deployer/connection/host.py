"""A host as the user named it: opens links to it over one connection, and reconnects if that broke."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from deployer.errors import FerryError, LostConnection, UsageError
from deployer.printable import Shown, shown
from deployer.terminal import notice
from deployer.transport.protocol import Transport

if TYPE_CHECKING:
    from deployer.connection.link import Link
    from deployer.connection.ssh_transport import SshTransport

HERE = "this machine"
GIVE_UP_AFTER_S = 600.0
"""Seconds during which the client tries to reconnect. The job runs on during this time and after it."""
_told: set[str] = set()
"""Commands after --ssh whose options without effect were reported."""
BACKOFF_S = (0.5, 1.0, 2.0, 5.0, 10.0)

Way = Literal["auto", "fabric", "openssh"]
"""How to connect by SSH; see `make_transport`."""

Tell = Callable[[Shown], None]


@dataclass
class Host:
    """Where jobs run. `prefetch` begins to connect while other work goes on; `connect` opens a link."""

    ssh: str | None
    root: str
    ssh_key: str | None = None
    accept_new_host_key: bool = False
    transport: Way = "auto"
    connect_timeout_s: float | None = None
    begun: Transport | None = field(default=None, repr=False)
    """A connection to `ssh` that was started before the other fields were known."""
    _transport: Transport | None = field(default=None, init=False, repr=False)
    _link: Link | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.root.startswith(("/", "~")):
            raise UsageError(
                f"the remote root {self.root!r} is a relative path",
                hint="begin it with / or ~ (the home folder on the host)",
            )
        if self.ssh is None and self.ssh_key is not None:
            raise UsageError("--ssh-key names a key for --ssh, and there is none: this machine is meant")
        if self.ssh is not None and " " in self.ssh:  # a whole command, as providers print it
            self._take_command(self.ssh)
        self._transport = self.begun

    def _take_command(self, text: str) -> None:
        from deployer.transport.ssh.target import parse_target

        target = parse_target(text)
        self.ssh, self.ssh_key = target.address, self.ssh_key or target.key
        if target.ignored and text not in _told:
            _told.add(text)
            notice(shown(f"note: without effect in --ssh: {', '.join(target.ignored)}"))

    @property
    def name(self) -> str:
        return self.ssh or HERE

    @property
    def full_name(self) -> str:
        """`name`; for this machine followed by its host name, which its error messages contain."""
        return self.ssh or f"{HERE} ({os.uname().nodename})"

    def prefetch(self) -> None:
        """Begins to connect in the background, unless a connection exists."""
        if self._transport is None:
            self._transport = self._make_transport()

    def load(self) -> None:
        """Call it after `prefetch` and before work that can wait; see SshTransport."""
        if self.ssh is not None:
            load_link(self._ssh_transport())

    def connect(self, *, request: dict[str, Any] | None = None, **more: Any) -> Link:
        """Opens a link and sends its first request; `more`: see Link.open. Raises ConnectError; the call raises a
        refusal by the host."""
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

    def another(self) -> Host:
        """The same host, for a separate connection."""
        return Host(self.ssh, self.root, self.ssh_key, self.accept_new_host_key, self.transport, self.connect_timeout_s)

    def dial(self) -> float:
        """Connects unless connected, and returns the seconds that it took. Raises ConnectError with a hint."""
        begun = time.monotonic()
        self.prefetch()
        assert self._transport is not None
        self._transport.connect()
        return time.monotonic() - begun

    def close(self) -> None:
        """Closes the connection, if there is one; jobs keep running."""
        if self._link is not None:
            self._link.close()
        if self._transport is not None:
            self._transport.close()
        self._link = self._transport = None

    def _ssh_transport(self) -> SshTransport:
        from deployer.connection.ssh_transport import SshTransport

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


def load_link(transport: Transport) -> None:
    """Loads the modules that a link over this connection needs; a local connection needs none."""
    from deployer.connection.ssh_transport import SshTransport

    if isinstance(transport, SshTransport):
        transport.load()


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

    `way`: `fabric` (paramiko), `openssh` (the ssh program), or `auto`, which uses openssh if the host's options need
    it. `connect_timeout_s` bounds connecting and logging in, without the time in which a person answers a question;
    without it, ssh_config's ConnectTimeout or 10 s counts.
    """
    if ssh is None:
        from deployer.transport.local import LocalTransport

        return LocalTransport()
    from deployer.connection.ssh_transport import SshTransport
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


# --- broken connections -----------------------------------------------------------------------------------------------


class ReconnectBackoff:
    """The back-off while connections break; gives up if nothing has arrived for `give_up_after_s`."""

    def __init__(self, tell: Tell, *, give_up_after_s: float = GIVE_UP_AFTER_S) -> None:
        self._tell = tell
        self._give_up_after_s = give_up_after_s
        self._tries = 0
        self._last = time.monotonic()

    def progressed(self) -> None:
        """Something has arrived: the next break starts again with the shortest wait."""
        self._tries, self._last = 0, time.monotonic()

    def wait(self, error: FerryError) -> None:
        """Waits before the next try. After the last one, raises the error as LostConnection."""
        if time.monotonic() - self._last > self._give_up_after_s:
            raise LostConnection(error.message, where=error.where, hint=error.hint) from error
        if not self._tries:
            self._tell(shown(f"{error.message}; trying again"))
        wait_s = BACKOFF_S[min(self._tries, len(BACKOFF_S) - 1)]
        self._tries += 1
        time.sleep(wait_s)
