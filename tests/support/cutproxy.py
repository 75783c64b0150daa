"""A TCP proxy that breaks connections at random bytes, by a seed: what a bad network does to an SSH session."""

from __future__ import annotations

import random
import socket
import struct
import threading
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.sshd import SshServer


@dataclass
class CutProxy:
    """Hands connections on to `server`; the first `cuts` of them are broken after a random number of bytes down."""

    server: SshServer
    cuts: int
    largest: int
    """Bytes from the server before a cut, at most."""
    seed: int
    comes_back: bool = True
    """False: after its cuts the host lets nobody in any more."""
    made: int = 0
    """Cuts so far."""
    _listener: socket.socket = field(default_factory=lambda: socket.create_server(("127.0.0.1", 0)))

    def __enter__(self) -> CutProxy:
        self._random = random.Random(self.seed)
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._listener.close()

    def client_config(self, folder: Path) -> Path:
        """A client's config that leads through this proxy to the server."""
        port = self._listener.getsockname()[1]
        path = folder / "cut_config"
        path.write_text(self.server.client_config_path.read_text().replace(f"Port {self.server.port}", f"Port {port}"))
        with self.server.known_hosts_path.open("a") as f:
            f.write(self.server.host_key_line(f"[127.0.0.1]:{port}"))
        return path

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.made == self.cuts and not self.comes_back:
                client.close()
                continue
            there = socket.create_connection(("127.0.0.1", self.server.port))
            left = self._random.randrange(self.largest) if self.made < self.cuts else None
            self.made += left is not None
            reset = bool(self._random.getrandbits(1))
            for source, target, allowed in ((there, client, left), (client, there, None)):
                threading.Thread(target=_pump, args=(source, target, allowed, reset), daemon=True).start()


def _pump(source: socket.socket, target: socket.socket, left: int | None, reset: bool) -> None:
    """Hands bytes on until an end, or until `left` are over; then both connections end, with a reset or in order."""
    try:
        while data := source.recv(1 << 16):
            target.sendall(data if left is None else data[:left])
            if left is not None:
                left -= len(data)
                if left <= 0:
                    break
    except OSError:
        pass
    for end in (source, target):
        try:
            if reset and left is not None:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            end.shutdown(socket.SHUT_RD if reset and left is not None else socket.SHUT_RDWR)  # wakes the other pump
            end.close()
        except OSError:
            pass
