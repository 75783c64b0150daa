"""One connection to a port of this host, as a stream of the conversation.

Stdlib only, Python 3.8: this package runs on the host.
"""

import errno
import socket
import threading
from contextlib import suppress
from typing import NamedTuple

from ..host.errors import AgentError
from ..host.layout import Root
from ..wire import frames
from ..wire.conversation import Call
from ..wire.frames import ProtocolError

CONNECT_S = 10.0
LOOPBACKS = ("127.0.0.1", "::1")
"""A server on `localhost` may listen on either one."""


class _Port(NamedTuple):
    port: int


def relay(root: Root, call: Call) -> None:
    """Connects to the port on the loopback interface. Sends `connected`, then `end` when the other side has sent
    everything. The client's end is passed on, and the request ends with both. There is no time limit: a slow or silent
    side is waited for."""
    port = call.read(_Port).port
    remote = _connect(port)
    with remote:
        remote.settimeout(None)
        remote.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        call.send_event("connected")
        feeding = threading.Thread(target=_feed, args=(remote, call), daemon=True)
        feeding.start()
        try:
            _pump(remote, call, port)
            feeding.join()
        finally:
            with suppress(OSError):
                remote.shutdown(socket.SHUT_RDWR)  # wakes who still writes
            call.close()  # and who waits for more to write


def _connect(port: int) -> socket.socket:
    if not 0 < port < 65536:
        raise AgentError("usage", "%d is no port: 1 to 65535" % port)
    refused = None
    for address in LOOPBACKS:
        try:
            return socket.create_connection((address, port), timeout=CONNECT_S)
        except OSError as error:
            refused = refused or error
    assert refused is not None
    if refused.errno == errno.ECONNREFUSED:
        raise AgentError("host", "nothing listens on port %d there" % port)
    raise AgentError("host", "port %d there: %s" % (port, refused.strerror or refused))


def _feed(remote: socket.socket, call: Call) -> None:
    """Passes on the client's bytes. A client that is gone, or reads no more, ends the connection."""
    try:
        for frame in call.receive():
            remote.sendall(frame.body)
        remote.shutdown(socket.SHUT_WR)
    except (ProtocolError, OSError):
        with suppress(OSError):
            remote.shutdown(socket.SHUT_RDWR)


def _pump(remote: socket.socket, call: Call, port: int) -> None:
    while True:
        try:
            data = remote.recv(frames.MAX_BODY)
        except OSError as error:  # cut off by the other side, which takes no more either
            raise AgentError("host", "port %d there: %s" % (port, error.strerror or error))
        if not data:
            break
        call.send_data(data, within_s=None)
    call.send_event("end")
