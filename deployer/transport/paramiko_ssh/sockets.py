"""Byte pipes to an SSH server: TCP tuned for small packets, or the user's ProxyCommand."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from deployer.errors import ConnectError
from deployer.terminal import relay
from deployer.transport.protocol import Drain
from deployer.transport.ssh.attempt import has_terminal
from deployer.transport.ssh.explain import explain_socket_error
from deployer.transport.ssh.ssh_config import SshOptions

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

QUICK_RECEIPTS = 300
"""Receipts after which the kernel may delay acknowledgements again: the handshake and first exec are over by then."""
CLIENT_VERSION = "SSH-2.0-Torchferry"
"""The line with which this client begins every SSH connection (RFC 4253, 4.2)."""
UNACKNOWLEDGED_S = 45.0
"""Seconds after which data that the other side's kernel has not acknowledged breaks the connection. A user's own
ServerAlive settings replace it."""
ATTEMPTS_APART_S = 1.0
HEARD_BYTES = 4096
LAST_WORDS_S = 0.5
"""Seconds to wait for the last stderr output of a ProxyCommand that has ended."""


class SshSocket(socket.socket):
    """A connected socket that acknowledges at once, and breaks if the other side is gone.

    sshd writes SUCCESS, a host-keys note and the channel's confirmation as separate packets. With Nagle's algorithm on,
    it waits for our ACK between them, which Linux would hold back for 40 ms. TCP_QUICKACK is not sticky, so it is set
    again after each of the first receipts.
    """

    def __init__(
        self, connected: socket.socket, *, keep_alive: bool = True, unacknowledged_s: float = UNACKNOWLEDGED_S
    ) -> None:
        super().__init__(connected.family, connected.type, connected.proto, fileno=connected.detach())
        self._said = b""
        self.heard = b""
        """The first bytes received: the text that a server sends in place of SSH's first line."""
        self.beside: Callable[[], str] = str
        """Returns the stderr output of the ProxyCommand that makes this connection."""
        self._quick = QUICK_RECEIPTS if self.family != socket.AF_UNIX and hasattr(socket, "TCP_QUICKACK") else 0
        if self.family != socket.AF_UNIX:
            self.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, keep_alive)
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                self.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * unacknowledged_s))
        self._acknowledge()

    def greet(self) -> None:
        """Sends the client's first line now, before the SSH library is loaded, so that the server can continue with its
        own line. When the library sends that line later, `send` reports it as sent."""
        line = f"{CLIENT_VERSION}\r\n".encode()
        with contextlib.suppress(OSError):  # the reader of the answer gets the error too
            self.sendall(line)
            self._said = line

    def send(self, data: ReadableBuffer, flags: int = 0, /) -> int:
        if self._said:
            said, self._said = self._said, b""
            if bytes(data).startswith(said):
                return len(said)
        return super().send(data, flags)

    def recv(self, bufsize: int, flags: int = 0, /) -> bytes:
        data = super().recv(bufsize, flags)
        self._acknowledge()
        if len(self.heard) < HEARD_BYTES:
            self.heard += data[:HEARD_BYTES]
        return data

    def close(self) -> None:
        if not self.heard:  # a server that hung up may have sent a reason, but our write failed before it was read
            with contextlib.suppress(OSError):
                self.setblocking(False)
                self.heard = super().recv(HEARD_BYTES)
        super().close()

    def _acknowledge(self) -> None:
        if self._quick > 0:
            self._quick -= 1
            try:
                self.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
            except OSError:  # the connection is already gone; the next read reports it
                self._quick = 0


def connect_tcp(options: SshOptions, *, timeout_s: float) -> SshSocket:
    """A TCP connection to the host; tries its addresses in order, within `timeout_s` in all. Raises ConnectError."""
    deadline = time.monotonic() + timeout_s
    name = options.hostname.encode() if options.hostname.isascii() else options.hostname  # text loads a codec for IDNA
    try:
        addresses = socket.getaddrinfo(name, options.port, options.address_family, socket.SOCK_STREAM)
    except OSError as error:
        raise explain_socket_error(error, host=options.hostname, port=options.port, timeout_s=timeout_s) from None
    failure: OSError = TimeoutError()
    for attempt in range(options.connection_attempts):  # as ssh: each attempt has the full time, one second apart
        if attempt:
            time.sleep(ATTEMPTS_APART_S)
            deadline = time.monotonic() + timeout_s
        for left, (family, _, _, _, address) in zip(range(len(addresses), 0, -1), addresses, strict=True):
            share_s = max(0.05, (deadline - time.monotonic()) / left)
            try:
                return _connect_one(family, address, options, timeout_s=share_s)
            except OSError as error:
                failure = error
    raise explain_socket_error(failure, host=options.hostname, port=options.port, timeout_s=timeout_s)


def _connect_one(
    family: socket.AddressFamily,
    address: tuple[str | int, ...] | tuple[int, bytes],
    options: SshOptions,
    *,
    timeout_s: float,
) -> SshSocket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        if options.bind_address:
            sock.bind((options.bind_address, 0))
        sock.connect(address)
        dead_after_s = options.dead_after_s or UNACKNOWLEDGED_S
        return SshSocket(sock, keep_alive=options.tcp_keepalive, unacknowledged_s=dead_after_s)
    except BaseException:
        sock.close()
        raise


def start_proxy(command: str) -> tuple[SshSocket, subprocess.Popen[bytes]]:
    """A socket connected to stdin and stdout of a ProxyCommand; like ssh, it is run by the user's shell."""
    ours, theirs = socket.socketpair()
    shell = os.environ.get("SHELL") or "/bin/sh"
    end = theirs.fileno()
    try:
        process = subprocess.Popen(
            [shell, "-c", f"exec {command}"], stdin=end, stdout=end, stderr=subprocess.PIPE, start_new_session=True
        )
    except OSError as error:
        raise ConnectError(f"the ProxyCommand cannot be started by {shell}: {error}") from None
    finally:
        theirs.close()
    assert process.stderr is not None
    show = relay() if has_terminal() else None  # it may ask the user to log in with a browser

    def keep(data: bytes) -> bytes:
        if show is not None:
            show(data)
        return data

    words = Drain(partial(os.read, process.stderr.fileno(), 1 << 15), keep)

    def beside() -> str:
        words.wait(LAST_WORDS_S)
        return words.text()

    pipe = SshSocket(ours)
    pipe.beside = beside
    return pipe, process
