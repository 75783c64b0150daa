"""Explains NCCL's and gloo's error texts, with advice, by a table of known texts; collects this rank's settings.

The texts are those of NCCL 2.18-2.27, gloo and torch 2.1-2.13, as found in public issue threads.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass

SIGNS = re.compile(
    r"NCCL|nccl|[Gg]loo|TCPStore|SocketImpl|pair\.cc|connectFullMesh|mismatch between collectives|"
    r"socket has (timed|failed)"
)


@dataclass(frozen=True)
class Explanation:
    """Why ranks could not communicate, with the text's numbers, and what to do."""

    cause: str
    advice: str
    is_lost_peer: bool = False
    """Whether a connection to another rank broke, usually because that rank ended: its log has the reason."""


@dataclass(frozen=True)
class Known:
    """A known error text: its pattern, whose groups fill the cause."""

    pattern: str
    cause: str
    advice: str
    is_lost_peer: bool = False


KNOWN = (
    Known(
        r"Duplicate GPU detected : rank (\d+) and rank (\d+) both on CUDA device (\w+)",
        "rank {0} and rank {1} use the same GPU (bus id {2})",
        "name each GPU once in target.gpu_ranks; two slices (MIG) of one GPU cannot talk over NCCL",
    ),
    Known(
        r"(?:Connect|connect) to (\S+?)<(\d+)> failed : ([\w ]+)",
        "NCCL reached for {0} port {1} over the network and got: {2}",
        "set target.env.NCCL_SOCKET_IFNAME to the interface that leads to the other nodes, and let no firewall between",
    ),
    Known(
        r"[Nn]o socket interface found",
        "NCCL finds no network interface that it may use",
        "target.env.NCCL_SOCKET_IFNAME must name one of the interfaces below (lo for one node alone)",
    ),
    Known(
        r"[Ee]rror while creating shared memory segment (\S+)|/dev/shm/nccl-\S+",
        "/dev/shm has no room for NCCL's buffers",
        "give the container more: docker run --shm-size=8g, or --ipc=host; target.env.NCCL_SHM_DISABLE=1 does without",
    ),
    Known(
        r"OpType=(\w+).*?Timeout\(ms\)=(\d+)",
        "no answer to the collective {0} within {1} ms: a rank never came to it",
        "the rank that is late or gone has the reason in its log; train.debug_distributed=info records the collectives",
    ),
    Known(
        r"Timed out waiting (\d+)ms for (recv|send) operation",
        "another rank did not come to a collective within {0} ms",
        "the rank that is late or gone has the reason in its log",
    ),
    Known(
        r"[Dd]etected mismatch between collectives on ranks",
        "the ranks called different collectives",
        "something in the code depends on the rank (or on its data) before a collective; the text names both calls",
    ),
    Known(
        r"ncclRemoteError|remote process exit(?:ing|ed)|"
        r"[Cc]onnection (?:closed|reset) by (?:remote )?peer|Broken pipe",
        "another rank ended without a word, or the connection to it broke",
        "look for the first failing rank's message; without one a signal ended it: -9 or SIGKILL is mostly the "
        "system's out-of-memory killer (see dmesg)",
        is_lost_peer=True,
    ),
    Known(
        r"ibv_(?:reg_mr|create_cq|create_qp)\S* failed|Got completion (?:from|with) .*error",
        "InfiniBand refuses or breaks the connection",
        "ulimit -l must be unlimited (docker: --ulimit memlock=-1); target.env.NCCL_IB_DISABLE=1 does without",
    ),
    Known(
        r"peer access is not supported|p2p.*(?:fail|not supported)|Could not enable P2P",
        "these GPUs cannot reach each other's memory",
        "target.env.NCCL_P2P_DISABLE=1 goes over host memory; virtual machines and IOMMU/ACS settings often cause it",
    ),
    Known(
        r"Cuda failure (?:\d+ )?'out of memory'",
        "NCCL found no GPU memory for its own buffers",
        "the run itself fills the GPU: lower train.micro_batch_size or data.seq_len a little",
    ),
    Known(
        r"CUDA driver version is insufficient|driver/library version mismatch",
        "the GPU driver is older than the CUDA that torch was built with",
        "update the driver, or install a torch for an older CUDA",
    ),
    Known(
        r"[Gg]loo connectFullMesh failed|[Uu]nable to (?:resolve hostname|find (?:address|interface))|getaddrinfo",
        "gloo, which carries flags and barriers, cannot connect the ranks",
        "set target.env.GLOO_SOCKET_IFNAME to the interface of the address that the ranks meet at (lo for one node)",
    ),
    Known(
        r"EADDRINUSE|[Aa]ddress already in use",
        "the port that the ranks would meet at is taken",
        "an earlier job may still run (ps, deploy.py ps); train.py itself chooses a free port",
    ),
    Known(
        r"client socket has timed out after (\S+) while trying to connect to \(?([^)]+)\)?",
        "no rank listens at {1} after {0}",
        "the first node must be up and reachable there: address, port, firewall",
    ),
    Known(
        r"unhandled system error|ncclSystemError",
        "a system call of NCCL failed (network, shared memory, or limits)",
        "run again with train.debug_distributed=info: NCCL then names the call",
    ),
    Known(
        r"unhandled cuda error|ncclUnhandledCudaError",
        "a CUDA call inside NCCL failed",
        "run again with train.debug_distributed=info; often another process on the GPUs, or a broken one (dmesg: Xid)",
    ),
    Known(
        r"ncclInternalError|internal error",
        "NCCL failed inside",
        "run again with train.debug_distributed=info, and try target.env.NCCL_P2P_DISABLE=1",
    ),
)


def is_comm_error(message: str) -> bool:
    return SIGNS.search(message) is not None


def explain(message: str) -> Explanation | None:
    """The first known text in a message, specific ones before general ones; None if there is none."""
    if not is_comm_error(message):
        return None
    for known in KNOWN:
        found = re.search(known.pattern, message, re.DOTALL)
        if found:
            return Explanation(known.cause.format(*found.groups()), known.advice, known.is_lost_peer)
    return None


def comm_facts(environ: Mapping[str, str] | None = None) -> list[str]:
    """What affects this rank's communication: its GPU, the host's interfaces, the settings. One line each."""
    environ = os.environ if environ is None else environ
    settings = [f"{name}={value}" for name, value in sorted(environ.items()) if name.startswith(("NCCL_", "GLOO_"))]
    facts = [f"interfaces: {', '.join(read_interfaces()) or 'none'}"]
    gpu = read_gpu()
    return [*([f"GPU: {gpu}"] if gpu else []), *facts, f"settings: {' '.join(settings) or 'none of NCCL_*, GLOO_*'}"]


def read_interfaces() -> list[str]:
    """`eth0 10.0.0.5` for each interface of this host; only the name if it has no address."""
    return [" ".join(part for part in (name, _address(name)) if part) for _, name in socket.if_nameindex()]


def _address(interface: str) -> str:
    if sys.platform != "linux":
        return ""
    import fcntl
    import struct

    request_address = 0x8915  # SIOCGIFADDR
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), request_address, struct.pack("256s", interface[:15].encode()))
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


def read_gpu() -> str:
    """`cuda:1, NVIDIA H100 80GB HBM3, UUID …, bus 0000:1a:00` of this rank; empty without CUDA."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return ""
    index = torch.cuda.current_device()
    card = torch.cuda.get_device_properties(index)
    bus = f"{card.pci_domain_id:04x}:{card.pci_bus_id:02x}:{card.pci_device_id:02x}"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    return f"cuda:{index} of CUDA_VISIBLE_DEVICES={visible}, {card.name}, GPU-{card.uuid}, bus {bus}"
