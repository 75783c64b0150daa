"""A job's GPUs on a shared host: claimed before any file is sent, held while the job runs, and queued for without a
daemon.

Stdlib only, Python 3.8, Linux.
"""

import os
import subprocess
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Collection, Dict, Iterator, List, Optional, Sequence, Tuple

from ..host.environment import container_env, job_environment
from ..host.errors import AgentError
from ..host.layout import Root
from ..host.typed import to_json
from . import nvidia
from .leases import MAX_NUMBER, Claims, HeldClaim, claiming, read_claims, show_again, take_over
from .nvidia import GpuView
from .queue import Devices, any_overlap, freest, grant, holds, queue_of, queue_view, refusal
from .report import GpuClaim, GpuLimit, GpuReport, GpuRow, GpuTicket
from .view import (
    LEASE,
    SHARED,
    TICKET,
    Claim,
    ClaimKind,
    GpuRequest,
    InheritedClaim,
    QueueView,
    auto_count,
)

if TYPE_CHECKING:
    from ..wire.conversation import Call

_MINE = "mine"


def claim_gpus(wanted: GpuRequest, env: Dict[str, str]) -> HeldClaim:
    """Claims and holds the GPUs that a job requests; with `queue`, a ticket if they are not free.

    Raises AgentError if the host lacks them, or if they are not free, with who has them.
    """
    gpu_view = _read_for(wanted, env)
    if wanted.allow_busy:
        return _beside(wanted, gpu_view)
    with claiming() as claims:
        seen = _of_others(claims.read(), wanted.job)
        number = min(max((c.number for c in seen), default=0) + 1, MAX_NUMBER)
        mine = Claim(TICKET, wanted.job, _devices(gpu_view), auto_count(wanted.gpus), number)
        mine = mine._replace(file=_MINE, since=time.time())  # after those that have the last number too
        chosen = grant([*seen, mine], gpu_view.known, gpu_view.busy()).get(_MINE)
        if chosen is not None:
            return _lease(claims, wanted, chosen, gpu_view)
        if wanted.queue:
            return claims.hold(mine)
    raise _refused(queue_view(mine, seen, gpu_view), seen, gpu_view)


@contextmanager
def claimed(wanted: GpuRequest, env: Dict[str, str]) -> Iterator[HeldClaim]:
    """The same, until the supervisor that is started in the block holds the claim itself."""
    held = claim_gpus(wanted, env)
    try:
        yield held
    finally:
        held.release()


def would_get(wanted: GpuRequest, env: Dict[str, str]) -> str:
    """The GPUs that a job would get now, as CUDA_VISIBLE_DEVICES lists them. For `auto:N` this includes busy GPUs."""
    gpu_view = _read_for(wanted, env)
    return _visible(wanted, _choose_beside(wanted, gpu_view), gpu_view)


def report(root: Root, call: "Call") -> None:
    """Sends the host's GPUs, who holds and uses each, and the queue."""
    env = job_environment(dict(os.environ), container_env())
    gpu_view, claims = nvidia.read_gpus([], env, limited=True), read_claims()
    rows = []
    for gpu in gpu_view.gpus:
        holding = [c for c in claims if c.kind != TICKET and holds(c, gpu.device)]
        held = tuple(GpuClaim(c.job, c.user, c.since, c.kind == SHARED, c.devices) for c in holding)
        rows.append(GpuRow(*gpu, held=held, processes=tuple(h for h in gpu_view.using if h.gpu_uuid == gpu.uuid)))
    index_of = {gpu.uuid: str(gpu.index) for gpu in gpu_view.gpus}
    queue = [
        GpuTicket(
            t.job, t.user, t.since, "auto:%d" % t.auto if t.auto else ",".join(index_of.get(d, d) for d in t.devices)
        )
        for t in queue_of(claims)
    ]
    limit = GpuLimit(gpu_view.limit.text, tuple(gpu.label for gpu in gpu_view.limit.gpus)) if gpu_view.limit else None
    call.send_event("gpus", to_json(GpuReport(tuple(rows), tuple(queue), limit)))


# --- parts ------------------------------------------------------------------------------------------------------------


def _read_for(wanted: GpuRequest, env: Dict[str, str]) -> GpuView:
    return nvidia.read_gpus(wanted.gpus, env, on_cpu=wanted.on_cpu, limited=True)


def _of_others(claims: Sequence[Claim], job: str, *, but: str = "") -> List[Claim]:
    """The claims without the job's own: an interrupted launch is repeated while its earlier claim may still exist."""
    mine = (job, os.geteuid())
    return [c for c in claims if (c.job, c.uid) != mine or c.file == but]


def _devices(gpu_view: GpuView) -> Devices:
    """The devices that are named; for auto:N those from which it may choose, empty for all."""
    chosen = gpu_view.usable if gpu_view.limit and not gpu_view.named else gpu_view.named
    return tuple(gpu.device for gpu in chosen)


def _lease(
    claims: Claims, wanted: GpuRequest, devices: Devices, gpu_view: GpuView, kind: ClaimKind = LEASE
) -> HeldClaim:
    return claims.hold(Claim(kind, wanted.job, devices), _visible(wanted, devices, gpu_view))


def _visible(wanted: GpuRequest, devices: Sequence[str], gpu_view: GpuView) -> str:
    """CUDA_VISIBLE_DEVICES: as the plan names the GPUs, or the chosen indices."""
    if not auto_count(wanted.gpus):
        return ",".join(wanted.gpus)
    return ",".join(gpu.label for gpu in gpu_view.known if gpu.device in devices)


def _beside(wanted: GpuRequest, gpu_view: GpuView) -> HeldClaim:
    """A claim that keeps no other job out. If it cannot be made, the job starts without it."""
    devices = _choose_beside(wanted, gpu_view)
    try:
        with claiming() as claims:
            return _lease(claims, wanted, devices, gpu_view, SHARED)
    except AgentError:
        return HeldClaim(Claim(SHARED, wanted.job, devices), _visible(wanted, devices, gpu_view))


def _choose_beside(wanted: GpuRequest, gpu_view: GpuView) -> Devices:
    count = auto_count(wanted.gpus)
    if not count:
        return tuple(gpu.device for gpu in gpu_view.named)
    try:
        leased = [device for c in read_claims() if c.kind != TICKET for device in c.devices]
    except AgentError:
        leased = []
    return freest(gpu_view.usable, count, [*leased, *gpu_view.busy()])


def _refused(view: QueueView, claims: Sequence[Claim], gpu_view: GpuView) -> AgentError:
    taken = [d for c in claims for d in (c.devices or [g.device for g in gpu_view.gpus]) if c.kind != SHARED]
    taken += list(gpu_view.busy())
    free = [gpu.label for gpu in gpu_view.usable if not any_overlap(gpu.device, taken)]
    offer = "these are free: --gpus %s. Or " % ",".join(free) if free else ""
    hint = offer + "add --queue to wait, or --allow-busy to share the GPUs with what uses them"
    return AgentError("host", refusal(view, time.time()), hint)


# --- in the supervisor ------------------------------------------------------------------------------------------------

POLL_S = 1.0
"""Seconds between two reads of the claims by a waiting job."""
AGAIN_S = 2.0
"""Seconds for which a new supervisor waits for the lock on the claims: its caller waits for it."""
GPU_VIEW_S = 10.0
"""Seconds between two calls of nvidia-smi while only leases keep a job waiting; it is always called before a start."""


class JobGpus:
    """Call `look` until it is not `waiting` any more; then start the job with `visible` and `stdin`."""

    def __init__(self, wanted: GpuRequest, env: Dict[str, str], inherited: Optional[InheritedClaim]) -> None:
        """`inherited`: the agent's claim. None for a job whose supervisor was killed (see hold_again), and for one that
        waited for another job (see claim)."""
        self.view: Optional[QueueView] = None
        """Why the job waits."""
        self.given_to = ""
        """The job that claimed the GPUs while nobody held them."""
        self._wanted = wanted
        self._env = env
        self._held = take_over(inherited) if inherited else None
        self._gpu_view: Optional[GpuView] = None
        self._seen_at = self._looked_at = self._keep_again_at = float("-inf")

    @property
    def waiting(self) -> bool:
        return self._held is not None and self._held.claim.kind == TICKET

    @property
    def visible(self) -> str:
        """CUDA_VISIBLE_DEVICES for the whole job."""
        return self._held.visible if self._held is not None else ""

    @property
    def devices(self) -> Tuple[str, ...]:
        return self._held.claim.devices if self._held is not None else ()

    @property
    def stdin(self) -> int:
        """The stdin for the job's processes, which torchrun passes on to its ranks. It reads as an empty file, and the
        GPUs are held as long as one of these processes lives."""
        return self._held.fd if self._held is not None and self._held.fd >= 0 else subprocess.DEVNULL

    def look(self) -> None:
        """Claims the GPUs if it is the job's turn. Call it often: it reads the claims only when it is time to.

        If they cannot be read (for example, a driver hangs), the job keeps its place.
        """
        if self._held is None or time.monotonic() - self._looked_at < POLL_S:
            return
        self._looked_at = time.monotonic()
        self.keep()
        try:
            self._look(self._held)
        except AgentError as e:
            self.view = (self.view or QueueView())._replace(trouble=e.message)

    def claim(self) -> None:
        """Claims the GPUs of a job that was launched without a claim, or queues for them. Raises AgentError if the
        state of the GPUs cannot be read."""
        self._held = claim_gpus(self._wanted._replace(queue=True), self._env)

    def hold_again(self, devices: Sequence[str], visible: str) -> None:
        """Claims the GPUs again for a job whose supervisor was killed. The first claim ended with its last rank, so
        another job may hold the GPUs: then `given_to` names that job."""
        if not devices:
            return
        claim = Claim(SHARED if self._wanted.allow_busy else LEASE, self._wanted.job, tuple(devices))
        try:
            with claiming(AGAIN_S) as claims:
                others = [other for other in _of_others(claims.read(), self._wanted.job) if other.kind == LEASE]
                taken = [other.job for other in others if any(any_overlap(device, other.devices) for device in devices)]
                if taken and claim.kind == LEASE:
                    self.given_to = taken[0]
                else:
                    self._held = claims.hold(claim, visible)
        except (AgentError, OSError):
            self._held = HeldClaim(claim, visible)  # `keep` tries again

    def keep(self) -> None:
        """Restores the claim's file names and text if they were removed or changed; call it often. If no name is left,
        a new file is made. The supervisor holds it, and so do processes that it starts later; the running ranks still
        hold the old file, which has no name."""
        if self._held is None or time.monotonic() < self._keep_again_at:
            return
        try:
            is_lost, is_changed = self._held.is_lost, self._held.is_changed
            if not is_lost and not is_changed:
                return
            self._keep_again_at = time.monotonic() + POLL_S
            if is_changed:
                self._held.write_again()
            if is_lost:
                self._held = show_again(self._held)
        except (AgentError, OSError):
            pass  # the next call tries again

    def release(self, *, ended: bool = False) -> None:
        """`ended`: no process of the job is left."""
        if self._held is not None:
            self._held.release(ended=ended)

    def _look(self, ticket: HeldClaim) -> None:
        claims = self._others(read_claims(), ticket)
        gpu_view = self._gpu_view
        perhaps = gpu_view is None or self._granted(claims, gpu_view, busy=()) is not None
        if gpu_view is None or perhaps or time.monotonic() - self._seen_at > GPU_VIEW_S:
            gpu_view = self._gpu_view = _read_for(self._wanted, self._env)
            self._seen_at = time.monotonic()
        if perhaps:
            self._take(ticket, gpu_view)
        if self.waiting:
            self.view = queue_view(ticket.claim, claims, gpu_view, memory=False)

    def _take(self, ticket: HeldClaim, gpu_view: GpuView) -> None:
        with claiming() as claims:
            chosen = self._granted(self._others(claims.read(), ticket), gpu_view, busy=gpu_view.busy())
            if chosen is None:
                return
            self._held = _lease(claims, self._wanted, chosen, gpu_view)
        ticket.release(ended=True)

    def _others(self, claims: Sequence[Claim], ticket: HeldClaim) -> List[Claim]:
        return _of_others(claims, self._wanted.job, but=ticket.claim.file)

    def _granted(self, claims: Sequence[Claim], gpu_view: GpuView, *, busy: Collection[str]) -> Optional[Devices]:
        assert self._held is not None
        return grant(claims, gpu_view.known, busy).get(self._held.claim.file)
