"""What is said of GPUs: what a job wants, what it holds, why it waits, and what still holds those of a stopped one.

Stdlib only, Python 3.8: both ends use it, and a job without GPUs loads nothing else of this folder.
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
    """How many GPUs `auto:N` asks for; 0 for GPUs that are named."""
    matches = [_AUTO.match(text) for text in requested]
    return int(matches[0].group(1)) if len(matches) == 1 and matches[0] else 0


class GpuRequest(NamedTuple):
    """What a job asks for on this host."""

    job: str
    gpus: Tuple[str, ...]
    """Indices or UUIDs, or one auto:N."""
    queue: bool = False
    """Wait for them."""
    allow_busy: bool = False
    """Take them though others use them."""
    on_cpu: str = "--device cpu"
    """The option of the job that does without."""


class GpuLoad(NamedTuple):
    """What a GPU does now; None for what its driver does not tell."""

    label: str
    name: str = ""
    use_percent: Optional[float] = None
    memory_used_mib: Optional[float] = None
    memory_total_mib: Optional[float] = None
    power_w: Optional[float] = None
    power_limit_w: Optional[float] = None
    temperature_c: Optional[float] = None


class Claim(NamedTuple):
    """What one job holds, or waits for."""

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
    """A claim on its way to a process that inherits its descriptor."""

    claim: Claim
    visible: str
    """Of a lease: CUDA_VISIBLE_DEVICES for the job."""
    fd: Optional[int] = None
    """None for one that could not be made; it keeps nobody out."""
    names: Tuple[str, ...] = ()


class BlockedGpu(NamedTuple):
    """A GPU that is not free: by whose job it is held, or else which processes are using it."""

    gpu: str
    job: str = ""
    user: str = ""
    since: float = 0.0
    """Unix time."""
    locker: str = ""
    """Who locks the lease, where that is not the job's user."""
    using: str = ""
    is_unread: bool = False
    """Its lease cannot be read, so it counts for every GPU."""


class Waiter(NamedTuple):
    """A job in the queue."""

    job: str
    user: str


class QueueView(NamedTuple):
    """Where a job stands in the queue, what holds each GPU that it wants, and which jobs come before it."""

    position: int = 0
    """0 until somebody could look."""
    wants: str = ""
    held: Tuple[BlockedGpu, ...] = ()
    before: Tuple[Waiter, ...] = ()
    trouble: str = ""
    """What keeps the host from looking."""


class GpuHolder(NamedTuple):
    """What still holds a GPU of a stopped job. `pid` is None for memory that no process seen here explains."""

    gpu: int
    pid: Optional[int] = None
    command: str = ""
    memory_mib: int = 0
