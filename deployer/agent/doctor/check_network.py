"""The doctor's check of the network interface that NCCL would choose.

Stdlib only, Python 3.8, Linux.
"""

import os
import socket
from typing import List, Mapping, NamedTuple, Optional

from ..host.files import read_text
from .findings import FAIL, OK, WARN, Check, check

_UP, _LOOPBACK = 0x1, 0x8  # IFF_* of linux/if.h


class Network(NamedTuple):
    """Interfaces that are up, in the kernel's order, without the loopback; which of them leads out, if any does."""

    names: List[str]
    default: Optional[str]


def read_network(sys: str = "/sys/class/net", proc: str = "/proc/net") -> Network:
    """Interfaces with an address. A route out is that of IPv4, else that of IPv6."""
    addressed = _addressed(proc)
    names = [name for _, name in socket.if_nameindex()] if sys == "/sys/class/net" else sorted(os.listdir(sys))
    up = [name for name in names if _is_up(os.path.join(sys, name, "flags")) and name in addressed]
    return Network(up, next((name for name in _defaults(proc) if name in up), None))


def _is_up(path: str) -> bool:
    text = read_text(path).strip()
    flags = int(text, 16) if text else 0
    return bool(flags & _UP) and not flags & _LOOPBACK


def _addressed(proc: str) -> List[str]:
    """Interfaces that have a route (each IPv4 address brings one) or an IPv6 address."""
    routes = [line.split("\t")[0].strip() for line in read_text(proc + "/route").splitlines()[1:]]
    return routes + [line.split()[-1] for line in read_text(proc + "/if_inet6").splitlines() if line.strip()]


def _defaults(proc: str) -> List[str]:
    """Interfaces of the default routes."""
    v4 = [line.split("\t") for line in read_text(proc + "/route").splitlines()[1:]]
    v6 = [line.split() for line in read_text(proc + "/ipv6_route").splitlines()]
    found = [row[0].strip() for row in v4 if len(row) > 7 and row[1] == row[7] == "00000000"]
    return found + [row[-1] for row in v6 if len(row) > 9 and row[0] == "0" * 32 and row[1] == "00" and row[-1] != "lo"]


def nccl_choice(names: List[str]) -> Optional[str]:
    """The interface that NCCL takes by itself: InfiniBand's first, Docker's last, else in the kernel's order."""
    ranked = sorted(names, key=lambda name: (not name.startswith("ib"), name.startswith("docker")))
    return ranked[0] if ranked else None


def check_network(network: Network, env: Mapping[str, str]) -> Check:
    """`env`: a job's environment, which may name the interface."""
    name, shown = "NCCL interface", ", ".join(network.names)
    named = env.get("NCCL_SOCKET_IFNAME", "")
    if named:
        if _matches(named, network.names):
            return check(name, OK, "NCCL_SOCKET_IFNAME=%s" % named)
        hint = "--env NCCL_SOCKET_IFNAME=%s" % (network.default or "lo")
        return check(name, FAIL, "NCCL_SOCKET_IFNAME=%s is none of %s" % (named, shown or "the interfaces"), hint)
    choice = nccl_choice(network.names)
    if choice is None:
        return check(name, WARN, "only the loopback is up", "jobs on this host alone: --env NCCL_SOCKET_IFNAME=lo")
    if network.default in (None, choice) or choice.startswith("ib"):
        return check(name, OK, "%s (of %s)" % (choice, shown) if len(network.names) > 1 else choice)
    detail = "NCCL would take %s of %s, but %s leads out" % (choice, shown, network.default)
    return check(name, WARN, detail, "--env NCCL_SOCKET_IFNAME=%s" % network.default)


def _matches(named: str, names: List[str]) -> bool:
    """NCCL's own rule: a list of beginnings; "=" before it asks for whole names, "^" excludes."""
    known = [*names, "lo"]
    exclude, exact = named.startswith("^"), named.lstrip("^").startswith("=")
    wanted = named.lstrip("^").lstrip("=").split(",")
    hit = {n for n in known if any(n == w or (not exact and n.startswith(w)) for w in wanted)}
    return bool(set(known) - hit - {"lo"}) if exclude else bool(hit)
