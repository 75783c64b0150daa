"""Which job gets which GPUs: pure functions. First in, first out, and no job passes one that waits for the same GPU.

Stdlib only, Python 3.8: this package runs on the host.
"""

from typing import Collection, Dict, List, Optional, Sequence, Tuple

from .nvidia import Gpu, GpuView, users_of
from .view import LEASE, TICKET, BlockedGpu, Claim, QueueView, Waiter

Devices = Tuple[str, ...]


def overlap(one: str, other: str) -> bool:
    """Whether two devices are the same, or one is a slice of the other."""
    return one == other or one.startswith(other + "/") or other.startswith(one + "/")


def any_overlap(device: str, others: Sequence[str]) -> bool:
    return any(overlap(device, other) for other in others)


def holds(lease: Claim, device: str) -> bool:
    """Whether a lease keeps other jobs from a device. A lease that cannot be read could be for any device."""
    return not lease.devices or any_overlap(device, lease.devices)


def queue_of(claims: Sequence[Claim]) -> List[Claim]:
    """The tickets in the order of their turns."""
    return sorted((c for c in claims if c.kind == TICKET), key=lambda c: (c.number, c.since, c.file))


def grant(claims: Sequence[Claim], gpus: Sequence[Gpu], busy: Collection[str]) -> Dict[str, Devices]:
    """The tickets (by file) that may start now, each with its devices.

    `gpus`: all known ones, including slices. A GPU is free if no lease names it and no process computes on it. A ticket
    that cannot start blocks the GPUs that it waits for: later tickets do not get them. A ticket for any GPU blocks all.
    """
    leases = [claim for claim in claims if claim.kind == LEASE]
    everything = [gpu.device for gpu in gpus]
    taken = [device for lease in leases for device in lease.devices or everything]
    granted: Dict[str, Devices] = {}
    for ticket in queue_of(claims):
        chosen = _choose(ticket, gpus, taken, busy)
        if chosen is not None:
            granted[ticket.file] = chosen
        taken += chosen if chosen is not None else _waits_for(ticket, gpus)
    return granted


def _choose(ticket: Claim, gpus: Sequence[Gpu], taken: Sequence[str], busy: Collection[str]) -> Optional[Devices]:
    if not ticket.auto:
        blocked = any(device in busy or any_overlap(device, taken) for device in ticket.devices)
        return None if blocked else ticket.devices
    pool = _pool(ticket, gpus)
    free = [gpu for gpu in pool if gpu.device not in busy and not any_overlap(gpu.device, taken)]
    return freest(free, ticket.auto, ()) if len(free) >= ticket.auto else None


def freest(gpus: Sequence[Gpu], count: int, avoid: Sequence[str]) -> Devices:
    """`count` GPUs in the order of their index: chosen first among those not in `avoid`, then by least memory in use,
    then by index."""
    ranked = sorted(gpus, key=lambda g: (any_overlap(g.device, avoid), g.memory_used_mib, g.index))
    return tuple(gpu.device for gpu in sorted(ranked[:count], key=lambda g: g.index))


def _pool(ticket: Claim, gpus: Sequence[Gpu]) -> List[Gpu]:
    """The GPUs from which a ticket for any GPU may choose: its devices if its login is limited to some."""
    if ticket.devices:
        return [gpu for gpu in gpus if gpu.device in ticket.devices]
    return [gpu for gpu in gpus if not (gpu.parent or gpu.fault)]


def _waits_for(ticket: Claim, gpus: Sequence[Gpu]) -> Devices:
    return tuple(gpu.device for gpu in _pool(ticket, gpus)) if ticket.auto else ticket.devices


# --- as text ----------------------------------------------------------------------------------------------------------


def queue_view(ticket: Claim, claims: Sequence[Claim], gpu_view: GpuView, *, memory: bool = True) -> QueueView:
    """Why a ticket waits. `memory`: with the MiB of processes, which change all the time."""
    tickets = queue_of(claims)
    wanted = _waits_for(ticket, gpu_view.known)
    before = [t for t in tickets[: _place(ticket, tickets)] if _shares(_waits_for(t, gpu_view.known), wanted)]
    held = [
        _blocked(gpu, claims, gpu_view, memory)
        for gpu in (_pool(ticket, gpu_view.known) if ticket.auto else gpu_view.named)
    ]
    return QueueView(
        len(before) + 1,
        "auto:%d" % ticket.auto if ticket.auto else ",".join(gpu.label for gpu in gpu_view.named),
        tuple(blocked for blocked in held if blocked is not None),
        tuple(Waiter(t.job, t.user) for t in before),
    )


def _place(ticket: Claim, tickets: Sequence[Claim]) -> int:
    return next((n for n, other in enumerate(tickets) if other.file == ticket.file), len(tickets))


def _shares(some: Devices, others: Devices) -> bool:
    return any(any_overlap(device, others) for device in some)


def _blocked(gpu: Gpu, claims: Sequence[Claim], gpu_view: GpuView, memory: bool) -> Optional[BlockedGpu]:
    lease = next((c for c in claims if c.kind == LEASE and holds(c, gpu.device)), None)
    if lease is not None:
        return BlockedGpu(gpu.label, lease.job, lease.user, lease.since, lease.locker, is_unread=not lease.devices)
    using = users_of(gpu, gpu_view.using, memory=memory)
    return BlockedGpu(gpu.label, using=using) if using else None


def refusal(view: QueueView, now: float) -> str:
    """Why a job without --queue gets no GPUs."""
    reasons = [_held_text(blocked, now) for blocked in view.held]
    waiting = ", ".join("job %s of user %s" % waiter for waiter in view.before)
    if waiting:
        reasons.append("before it in the queue for GPU %s: %s" % (view.wants, waiting))
    few = "fewer GPUs are free than %s asks for" % view.wants
    return "; ".join([few, *reasons] if view.wants.startswith("auto:") else reasons)


def queue_line(view: QueueView, now: float) -> str:
    """The state of a queued job, in one line."""
    parts = ["position %s" % (view.position or "?")]
    parts += [_held_text(blocked, now) for blocked in view.held]
    before = ["%s of %s" % waiter for waiter in view.before]
    if before:
        parts.append("before you: " + ", ".join(before))
    if view.trouble:
        parts.append(view.trouble)
    return "; ".join(parts)


def _held_text(blocked: BlockedGpu, now: float) -> str:
    if blocked.using:
        return "GPU %s is busy: %s" % (blocked.gpu, blocked.using)
    held = "GPU %s is held by job %s of user %s for %s" % (*blocked[:3], age_text(now - blocked.since))
    notes = ["its lease cannot be read, so it counts for every GPU"] if blocked.is_unread else []
    notes += ["its lease is locked by %s" % blocked.locker] if blocked.locker else []
    return held + ("" if not notes else " (%s)" % "; ".join(notes))


def age_text(seconds: float) -> str:
    """A duration as text: 42s, 7m, 3h, 2d."""
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return "%.0f%s" % (seconds / length, unit)
    return "%.0fs" % max(seconds, 0)
