"""All of a host's GPUs, as `gpus` shows them: who holds, uses and waits for each.

Stdlib only, Python 3.8: both ends use it.
"""

from typing import NamedTuple, Optional, Tuple

from .nvidia import Holder


class GpuClaim(NamedTuple):
    """A lease, as it stands beside a GPU."""

    job: str
    user: str
    since: float
    """Unix time."""
    shared: bool
    devices: Tuple[str, ...] = ()


class GpuRow(NamedTuple):
    """A GPU, who holds it and who uses it: the fields of Gpu, then these."""

    index: int  # type: ignore[assignment]
    uuid: str
    name: str
    memory_total_mib: int
    memory_used_mib: int
    parent: str = ""
    fault: str = ""
    """What nvidia-smi says in the place of its memory, of one that does not answer."""
    held: Tuple[GpuClaim, ...] = ()
    processes: Tuple[Holder, ...] = ()


class GpuTicket(NamedTuple):
    """A job in the queue."""

    job: str
    user: str
    since: float
    wants: str


class GpuLimit(NamedTuple):
    """What CUDA_VISIBLE_DEVICES of the login lets jobs use: indices, and UUIDs of slices."""

    text: str
    gpus: Tuple[str, ...]


class GpuReport(NamedTuple):
    gpus: Tuple[GpuRow, ...]
    queue: Tuple[GpuTicket, ...]
    limit: Optional[GpuLimit] = None
