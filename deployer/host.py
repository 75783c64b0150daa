"""A host as the user named it: opens links to it, each over a fresh connection."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from deployer.link import Link
from deployer.transport import Transport, make_transport


@dataclass
class Host:
    """Where jobs run. `prefetch` begins to connect while other work goes on; `connect` opens a link."""

    ssh: str | None
    root: str
    ssh_key: str | None = None
    accept_new_host_key: bool = False
    _begun: Transport | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        return self.ssh or "this machine"

    def prefetch(self) -> None:
        self._begun = self._transport()

    def connect(self, *, request: dict[str, Any] | None = None, payload: dict[str, Any] | None = None) -> Link:
        """A link with its first request under way. ConnectError, or the host's own refusal from the call."""
        transport, self._begun = self._begun or self._transport(), None
        return Link.open(transport, root=self.root, request=request, payload=payload)

    def _transport(self) -> Transport:
        return make_transport(
            self.ssh,
            ssh_key=self.ssh_key,
            accept_new_host_key=self.accept_new_host_key,
            config_file=os.environ.get("TORCHFERRY_SSH_CONFIG"),
        )
