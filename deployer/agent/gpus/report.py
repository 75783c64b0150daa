"""All of a host's GPUs, as `gpus` shows them: who holds, uses and waits for each.

Stdlib only, Python 3.8: both sides use it.
"""

from typing import NamedTuple, Optional, Tuple

from .nvidia import Holder


class GpuClaim(NamedTuple):
    """A lease of a GPU."""

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
    """nvidia-smi's text in place of the memory, if the GPU does not answer."""
    held: Tuple[GpuClaim, ...] = ()
    processes: Tuple[Holder, ...] = ()


class GpuTicket(NamedTuple):
    job: str
    user: str
    since: float
    wants: str


class GpuLimit(NamedTuple):
    """The GPUs that CUDA_VISIBLE_DEVICES of the login leaves to jobs: indices, and UUIDs of slices."""

    text: str
    gpus: Tuple[str, ...]


class GpuReport(NamedTuple):
    gpus: Tuple[GpuRow, ...]
    queue: Tuple[GpuTicket, ...]
    limit: Optional[GpuLimit] = None
