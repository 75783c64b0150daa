"""This machine as a host: the agent is a subprocess and speaks over pipes."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from deployer.errors import ConnectError
from deployer.transport.pipes import PipeStream


class LocalTransport:
    """Runs commands by /bin/sh in a session of their own, so that Ctrl-C in the terminal does not reach them."""

    description = "this machine"

    def __init__(self, *, env: Mapping[str, str] | None = None) -> None:
        self._env = env if env is not None else activated(os.environ)
        self._streams: list[PipeStream] = []

    def connect(self) -> None:
        """Nothing to do."""

    def open(self, command: str) -> PipeStream:
        """Starts `command`. ConnectError when this machine cannot start a process."""
        try:
            stream = PipeStream(["/bin/sh", "-c", command], host=self.description, env=self._env)
        except OSError as error:
            raise ConnectError(f"/bin/sh cannot be started on this machine: {error}") from None
        self._streams.append(stream)
        return stream

    def close(self) -> None:
        """Closes all streams; the commands see an end of file."""
        for stream in self._streams:
            stream.close()


def activated(env: Mapping[str, str]) -> dict[str, str]:
    """The environment as if this process's own venv were activated: a job here finds the same `python` and packages."""
    if sys.prefix == sys.base_prefix:
        return dict(env)
    path = os.pathsep.join([os.path.join(sys.prefix, "bin"), env.get("PATH", os.defpath)])  # noqa: PTH118
    return {**env, "VIRTUAL_ENV": sys.prefix, "PATH": path}
