"""This machine as a host: the agent is a subprocess that communicates through pipes, as with the ssh program."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from deployer.errors import ConnectError, LostConnection
from deployer.transport.protocol import WRITE_TIMEOUT_S, Drain, Limits


class LocalTransport:
    """Runs commands by /bin/sh in separate sessions, so that Ctrl-C in the terminal does not reach them."""

    description = "this machine"
    limits = Limits()

    def __init__(self, *, env: Mapping[str, str] | None = None) -> None:
        self._env = env if env is not None else activated(os.environ)
        self._streams: list[PipeStream] = []

    def connect(self) -> None:
        """Does nothing: this machine needs no connection."""

    def open(self, command: str) -> PipeStream:
        """Starts `command`. Raises ConnectError if this machine cannot start a process."""
        try:
            stream = PipeStream(["/bin/sh", "-c", command], host=self.description, env=self._env)
        except OSError as error:
            raise ConnectError(f"/bin/sh cannot be started on this machine: {error}") from None
        self._streams.append(stream)
        return stream

    def close(self) -> None:
        """Closes all streams; the commands read an end of file."""
        for stream in self._streams:
            stream.close()


def activated(env: Mapping[str, str]) -> dict[str, str]:
    """The environment as if this process's venv were activated: a job on this machine finds the same `python` and
    packages."""
    if sys.prefix == sys.base_prefix:
        return dict(env)
    path = os.pathsep.join([os.path.join(sys.prefix, "bin"), env.get("PATH", os.defpath)])  # noqa: PTH118
    return {**env, "VIRTUAL_ENV": sys.prefix, "PATH": path}


class PipeStream:
    """Stdin and stdout of a subprocess in a new session. Raises OSError if it cannot be started."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        host: str,
        env: Mapping[str, str] | None = None,
        sift: Callable[[bytes], bytes] = bytes,
    ) -> None:
        self.host = host
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=env,
            start_new_session=True,
        )
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._stdin = self._process.stdin
        self._stdout = self._process.stdout
        os.set_blocking(self._stdin.fileno(), False)
        stderr = self._process.stderr
        self._stderr = Drain(lambda: os.read(stderr.fileno(), 1 << 15), sift)
        self._wake, self._waker = socket.socketpair()
        self._lock = threading.Lock()  # held during non-blocking calls, so that no descriptor is closed during them
        self._closed = False

    def read(self, size: int) -> bytes:
        """See Stream."""
        try:
            poll = select.poll()
            poll.register(self._stdout, select.POLLIN)
            poll.register(self._wake, select.POLLIN)
            poll.poll()
        except ValueError:  # this side closed it
            return b""
        with self._lock:
            return b"" if self._closed else os.read(self._stdout.fileno(), size)

    def write(self, data: bytes) -> None:
        """See Stream."""
        rest = memoryview(data)
        deadline = time.monotonic() + WRITE_TIMEOUT_S
        while rest:
            sent = self._write_some(rest, deadline - time.monotonic())
            if sent:
                rest, deadline = rest[sent:], time.monotonic() + WRITE_TIMEOUT_S

    def _write_some(self, data: memoryview, timeout_s: float) -> int:
        if timeout_s <= 0:
            raise LostConnection(f"the process on {self.host} took no input for {WRITE_TIMEOUT_S:g} s")
        try:
            poll = select.poll()
            poll.register(self._stdin, select.POLLOUT)
            poll.poll(timeout_s * 1000)
            with self._lock:
                return os.write(self._stdin.fileno(), data)
        except BlockingIOError:
            return 0
        except (OSError, ValueError) as error:  # ValueError: this side closed it
            raise self._cannot_write(error) from None

    def _cannot_write(self, error: Exception) -> LostConnection:
        return LostConnection(f"the process on {self.host} takes no more input: {error}")

    def close_write(self) -> None:
        """See Stream."""
        with self._lock:
            self._stdin.close()

    def close(self) -> None:
        """See Stream. A process that ends later is reaped in the background."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._stdin.close()
            self._waker.close()  # wakes read()
            self._stdout.close()
        threading.Thread(target=self._reap, name="pipe-reaper", daemon=True).start()

    def _reap(self) -> None:
        self._process.wait()

    def stderr_text(self) -> str:
        """See Stream."""
        self._stderr.wait(0.2 if self._process.poll() is not None else 0)
        return self._stderr.text()

    def exit_status(self, timeout_s: float) -> int | None:
        """See Stream. An end by signal N counts as 128 + N, as in a shell."""
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        return code if code >= 0 else 128 + signal.Signals(-code).value
