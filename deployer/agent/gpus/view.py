"""The data about GPUs in requests and answers: what a job requests, what it holds, why it waits, and what still holds
the GPUs of a stopped job.

Stdlib only, Python 3.8: both sides use it, and a job without GPUs loads no other module of this folder.
"""

import re
from typing import Literal, NamedTuple, Optional, Sequence, Tuple

from ..host.processes import user_name

ClaimKind = Literal["lease", "shared", "ticket"]
LEASE: ClaimKind = "lease"
SHARED: ClaimKind = "shared"
TICKET: ClaimKind = "ticket"


_AUTO = re.compile(r"auto:(\d{1,3})\Z")


def auto_count(requested: Sequence[str]) -> int:
    """How many GPUs `auto:N` requests; 0 if GPUs are named."""
    matches = [_AUTO.match(text) for text in requested]
    return int(matches[0].group(1)) if len(matches) == 1 and matches[0] else 0


class GpuRequest(NamedTuple):
    """The GPUs that a job requests on this host."""

    job: str
    gpus: Tuple[str, ...]
    """Indices or UUIDs, or one auto:N."""
    queue: bool = False
    """Queue for them."""
    allow_busy: bool = False
    """Take them even if others use them."""
    on_cpu: str = "--device cpu"
    """The option that runs the job without GPUs."""


class GpuLoad(NamedTuple):
    """The current load of a GPU; None for a value that its driver does not report."""

    label: str
    name: str = ""
    use_percent: Optional[float] = None
    memory_used_mib: Optional[float] = None
    memory_total_mib: Optional[float] = None
    power_w: Optional[float] = None
    power_limit_w: Optional[float] = None
    temperature_c: Optional[float] = None


class Claim(NamedTuple):
    """The GPUs that a job holds or waits for."""

    kind: ClaimKind  # shared: beside others, it keeps nobody out; ticket: a place in the queue
    job: str
    devices: Tuple[str, ...]  # GPU-…, or GPU-…/MIG-… for a slice; a ticket's are those it waits for; of a lease that
    # cannot be read none, and it keeps others out of all
    auto: int = 0  # a ticket's: any so many GPUs, of its devices where it names some
    number: int = 0  # a ticket's place: the lower ones come first
    uid: int = 0  # the file's owner, whatever the text in it says
    since: float = 0.0  # Unix time
    file: str = ""  # tells it from others, also when it has several names
    locker: str = ""  # a process that has locked the file, when it is not of that user

    @property
    def user(self) -> str:
        return user_name(self.uid)


class InheritedClaim(NamedTuple):
    """A claim for a process that inherits its descriptor."""

    claim: Claim
    visible: str
    """CUDA_VISIBLE_DEVICES for the job, if the claim is a lease."""
    fd: Optional[int] = None
    """None for a claim that could not be made; it keeps no other job out."""
    names: Tuple[str, ...] = ()


class BlockedGpu(NamedTuple):
    """A GPU that is not free: the job that holds it, or else the processes that use it."""

    gpu: str
    job: str = ""
    user: str = ""
    since: float = 0.0
    """Unix time."""
    locker: str = ""
    """Who locks the lease, if it is not the job's user."""
    using: str = ""
    is_unread: bool = False
    """Its lease cannot be read, so it counts for every GPU."""


class Waiter(NamedTuple):
    job: str
    user: str


class QueueView(NamedTuple):
    """A job's place in the queue, what holds each GPU that it requests, and the jobs before it."""

    position: int = 0
    """0 until the queue could be read."""
    wants: str = ""
    held: Tuple[BlockedGpu, ...] = ()
    before: Tuple[Waiter, ...] = ()
    trouble: str = ""
    """Why the host could not read the queue."""


class GpuHolder(NamedTuple):
    """What still holds a GPU of a stopped job. `pid`: None for memory that no visible process explains."""

    gpu: int
    pid: Optional[int] = None
    command: str = ""
    memory_mib: int = 0
