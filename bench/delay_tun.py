"""Two network namespaces joined by a line with a given round-trip time, delayed packet by packet.

`tc netem` is missing from many kernels. A user-space TCP proxy acknowledges in place of the far end, and so hides the
stalls that a real distance causes. Here the kernel's TCP runs from end to end: every IP packet crosses two TUN
devices and waits half a round trip in between. Needs root and `ip`.

    with Line(rtt_ms=100) as line:
        subprocess.run([*line.client, "ssh", line.server_ip, …])
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import selectors
import struct
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from types import TracebackType

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
BURST = 256
"""Packets taken from one side before the other side gets its turn."""


class Line:
    """The namespaces and the process that delays packets; all removed on exit. `rtt_ms` 0 joins them by a veth pair."""

    client_ip = "10.78.0.1"
    server_ip = "10.78.0.2"

    def __init__(self, rtt_ms: float) -> None:
        self.rtt_ms = rtt_ms
        self._names = [f"tfbench{os.getpid()}{side}" for side in "cs"]
        self._process: subprocess.Popen[str] | None = None

    @property
    def client(self) -> list[str]:
        """A command prefix that runs the command on the client's side."""
        return ["ip", "netns", "exec", self._names[0]]

    @property
    def server(self) -> list[str]:
        """A command prefix that runs the command on the server's side."""
        return ["ip", "netns", "exec", self._names[1]]

    def __enter__(self) -> Line:
        for name in self._names:
            _ip(f"netns add {name}")
            _ip(f"-n {name} link set lo up")
        if self.rtt_ms > 0:
            self._start_delay()
        else:
            self._join_directly()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        for name in self._names:
            _ip(f"netns del {name}")

    def measured_rtt_ms(self, port: int) -> float:
        """The shortest of five times to connect by TCP to a listening port of the server."""
        code = (
            "import socket,sys,time\n"
            "def once():\n"
            "    begun = time.perf_counter()\n"
            "    socket.create_connection((sys.argv[1], int(sys.argv[2])), 10).close()\n"
            "    return time.perf_counter() - begun\n"
            "print(min(once() for _ in range(5)) * 1000)"
        )
        command = [*self.client, sys.executable, "-S", "-c", code, self.server_ip, str(port)]
        return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    def _join_directly(self) -> None:
        client, server = self._names
        _ip(f"link add wan0 netns {client} type veth peer name wan0 netns {server}")
        for name, address in ((client, self.client_ip), (server, self.server_ip)):
            _ip(f"-n {name} addr add {address}/24 dev wan0")
            _ip(f"-n {name} link set wan0 up")

    def _start_delay(self) -> None:
        client, server = self._names
        argv = [sys.executable, "-S", __file__, client, self.client_ip, server, self.server_ip, str(self.rtt_ms / 2)]
        self._process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "up\n":
            raise RuntimeError("the delay line did not come up")


def _ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True)


# --- the process that delays ------------------------------------------------------------------------------------------


def open_tun(namespace: str, address: str, *, peer: str) -> int:
    """A TUN device `wan0` inside a namespace, as a descriptor that reads and writes one IP packet at a time."""
    libc = ctypes.CDLL("libc.so.6", use_errno=True)
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(f"/var/run/netns/{namespace}", os.O_RDONLY)
    try:
        _check(libc.setns(there, 0))
        tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH", b"wan0", IFF_TUN | IFF_NO_PI))
        _check(libc.setns(home, 0))
    finally:
        os.close(there)
        os.close(home)
    _ip(f"-n {namespace} addr add {address} peer {peer} dev wan0")
    _ip(f"-n {namespace} link set wan0 mtu 1500 txqueuelen 10000 up")
    return tun


def _check(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), "setns")


def forward(one: int, other: int, delay_s: float) -> None:
    """Carries packets both ways, each `delay_s` after its arrival; in order, without loss. Does not return."""
    waiting: dict[int, deque[tuple[float, bytes]]] = {one: deque(), other: deque()}
    outlet = {one: other, other: one}
    selector = selectors.SelectSelector()  # microseconds; epoll rounds up to milliseconds
    for tun in outlet:
        selector.register(tun, selectors.EVENT_READ)
    while True:
        due = min((queue[0][0] for queue in waiting.values() if queue), default=time.monotonic() + 1)
        for key, _ in selector.select(max(0.0, due - time.monotonic())):
            _take(key.fd, waiting[key.fd], delay_s)
        for tun, queue in waiting.items():
            _release(outlet[tun], queue)


def _take(tun: int, queue: deque[tuple[float, bytes]], delay_s: float) -> None:
    due = time.monotonic() + delay_s
    try:
        for _ in range(BURST):
            queue.append((due, os.read(tun, 65536)))
    except BlockingIOError:
        return


def _release(tun: int, queue: deque[tuple[float, bytes]]) -> None:
    now = time.monotonic()
    while queue and queue[0][0] <= now:
        try:
            os.write(tun, queue[0][1])
        except BlockingIOError:
            return
        queue.popleft()


def main() -> None:
    client, client_ip, server, server_ip, delay_ms = sys.argv[1:]
    one = open_tun(client, client_ip, peer=server_ip)
    other = open_tun(server, server_ip, peer=client_ip)
    print("up", flush=True)
    forward(one, other, float(delay_ms) / 1000)


if __name__ == "__main__":
    if not Path("/dev/net/tun").exists():
        sys.exit("no /dev/net/tun on this machine")
    main()
