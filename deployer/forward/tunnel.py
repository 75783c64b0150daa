"""A port of this machine that is a port of a host: each connection is a stream of the conversation with its agent.

One mechanism for each way to a host, and none that a server could forbid: sshd's AllowTcpForwarding is not asked. The
agent's streams have separate windows, so a connection that is read slowly keeps no other one waiting.
"""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from deployer.agent.wire import frames
from deployer.agent.wire.frames import ProtocolError
from deployer.connection.call import Call
from deployer.connection.host import GIVE_UP_AFTER_S, Host, ReconnectBackoff, Tell
from deployer.connection.link import Link
from deployer.errors import ConnectError, FerryError, LostConnection, UsageError
from deployer.printable import shown

LOOPBACK = "127.0.0.1"
EACH_LINK = 24
"""Connections of one conversation at most; an agent takes few more requests at once."""
FRAMES_WAITING = 4096
"""Of one connection: more than its window has, unless the other side writes crumbs."""
LOOK_S = 0.2
"""How often one looks whether the connection to the host is still there."""


def listen(port: int, *, instead: Callable[[int], str]) -> socket.socket:
    """Listens on that port of this machine's loopback interface; 0: on any free one. UsageError when it cannot be had;
    `instead` words a command with another port."""
    try:
        return socket.create_server((LOOPBACK, port), backlog=128)
    except PermissionError:
        raise UsageError(
            f"port {port} of this machine is for root alone", hint=instead(_free_from(port + 8000))
        ) from None
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise UsageError(f"port {port} of this machine cannot be used: {error.strerror}") from None
        raise UsageError(f"port {port} of this machine is taken", hint=instead(_free_from(port + 1))) from None


def _free_from(first: int) -> int:
    """The next port that is free; 0, which stands for any, when none is."""
    for port in range(first, min(first + 200, 65536)):
        with suppress(OSError), socket.create_server((LOOPBACK, port)):
            return port
    return 0


class Tunnel:
    """From a listening socket here to a port there. `serve` goes on until somebody interrupts it; `close` ends it."""

    def __init__(
        self,
        host: Host,
        link: Link,
        listener: socket.socket,
        remote: int,
        *,
        tell: Tell,
        give_up_s: float = GIVE_UP_AFTER_S,
        again: Callable[[Link], int] | None = None,
    ) -> None:
        """`link`: an open conversation with the host; it is the tunnel's from now on. `again`: gives the port that is
        meant over a new one, where it is another then."""
        self._again = again
        self._host = host
        self._listener = listener
        self.remote = remote
        self._tell = tell
        self._backoff = ReconnectBackoff(tell, give_up_after_s=give_up_s)
        self._links = _Links(host, link)
        threading.Thread(target=self._accept, name="tunnel-accept", daemon=True).start()

    def serve(self) -> None:
        """Makes a connection that breaks again. LostConnection when none comes about any more."""
        while True:
            time.sleep(LOOK_S)
            link = self._links.first
            if link is not None and link.loss is not None:
                self._links.take_away()
                self._reconnect(link.loss)

    def _reconnect(self, error: FerryError) -> None:
        while True:
            self._backoff.wait(error)
            try:
                link = self._connect()
            except (LostConnection, ConnectError) as again:
                error = again
                continue
            self._backoff.progressed()
            self._tell(shown("connected again"))
            self._links.put(link)
            return

    def _connect(self) -> Link:
        link = self._host.connect()
        try:
            link.wait_ready()
            if link.loss is not None:
                raise link.loss
            if self._again is not None:
                self.remote = self._again(link)
        except BaseException:
            link.close()
            raise
        return link

    def close(self) -> None:
        self._listener.close()
        self._links.close()

    # --- one connection -----------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                local, _ = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._carry, args=(local,), name="tunnel", daemon=True).start()

    def _carry(self, local: socket.socket) -> None:
        with local:
            link = None
            try:
                link = self._links.borrow()
                call = link.call("relay", port=self.remote)
                call.let_wait(FRAMES_WAITING)
                events = call.events()
                next(events)  # connected
            except LostConnection:  # told by `serve`
                return
            except FerryError as error:
                self._tell(shown(error.message))
                return
            else:
                self._exchange(local, call, events)
            finally:
                if link is not None:
                    self._links.give_back(link)

    def _exchange(self, local: socket.socket, call: Call, events: Iterator[tuple[str, Any, bytes]]) -> None:
        local.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sending = threading.Thread(target=_send, args=(local, call), daemon=True)
        sending.start()
        is_read = True
        with suppress(FerryError):  # the other side was cut off, or the host is gone: so is this side
            for name, _, data in events:
                try:
                    if name == "data" and is_read:
                        local.sendall(data)
                    elif name == "end" and is_read:
                        local.shutdown(socket.SHUT_WR)
                except OSError:  # nobody here reads any more; what still comes is passed over
                    is_read = False
                    call.cancel()
        with suppress(OSError):
            local.shutdown(socket.SHUT_RDWR)  # wakes who still reads
        sending.join()


def _send(local: socket.socket, call: Call) -> None:
    try:
        while data := local.recv(frames.MAX_BODY):
            call.send_data(data, hurried=False)
        call.end_data()
    except OSError:  # cut off here
        with suppress(FerryError):
            call.cancel()
    except (FerryError, ProtocolError):
        pass  # the other direction ends it


class _Links:
    """The conversations that carry connections: the first one, which `serve` looks after, and more when it is full."""

    def __init__(self, host: Host, first: Link) -> None:
        self._host = host
        self.first: Link | None = first
        self._carried: dict[Link, int] = {first: 0}
        self._changed = threading.Condition()
        self._closed = self._dials = False

    def borrow(self) -> Link:
        """One that takes a connection more; waits while the host cannot be reached. Where all are full one caller logs
        in, without the lock: who gives back, or closes, waits for no login."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or (self._is_up() and not self._dials))
            if self._closed:
                raise LostConnection("the tunnel was closed")
            self._carried = {link: n for link, n in self._carried.items() if n or link.loss is None}
            if not self._is_full():
                return self._lend(self._free()[0])
            self._dials = True
        link = None
        try:
            link = self._host.connect()
        finally:
            with self._changed:
                self._dials = False
                self._changed.notify_all()
                is_late = self._closed
                if link is not None and not is_late:
                    self._lend(link)
        if is_late:
            link.close()
            raise LostConnection("the tunnel was closed")
        return link

    def _is_up(self) -> bool:
        return self.first is not None and self.first.loss is None

    def _free(self) -> list[Link]:
        return [link for link, n in self._carried.items() if n < EACH_LINK and link.loss is None]

    def _is_full(self) -> bool:
        return not self._free()

    def _lend(self, link: Link) -> Link:
        self._carried[link] = self._carried.get(link, 0) + 1
        return link

    def give_back(self, link: Link) -> None:
        with self._changed:
            self._carried[link] = self._carried.get(link, 1) - 1
            is_idle = not self._carried[link] and link is not self.first
            if is_idle:
                del self._carried[link]
            self._changed.notify_all()
        if is_idle:
            link.close()

    def take_away(self) -> None:
        """Who wants a conversation from now on waits for the next `put`."""
        with self._changed:
            self.first = None

    def put(self, link: Link) -> None:
        with self._changed:
            self.first = link
            self._carried.setdefault(link, 0)
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            links = [*self._carried]
        for link in links:
            link.close()
