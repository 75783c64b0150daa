"""A job's GPUs on a host that is shared: claimed before anything is shipped, held while the job lives, waited for in a
queue without a daemon.

Stdlib only, Python 3.8, Linux.
"""

import os
import time
from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, Sequence

from ..host.errors import AgentError
from ..host.layout import Root
from ..wire.conversation import Call
from . import nvidia
from .leases import LEASE, MAX_NUMBER, SHARED, TICKET, Claim, Claims, Held, claiming, read_claims
from .nvidia import Sight
from .queue import any_overlap, freest, grant, queue_of, queue_view, refusal

_MINE = "mine"


def claim_gpus(plan: Dict[str, Any], env: Dict[str, str]) -> Held:
    """The GPUs that a plan asks for, held; with policy.queue a ticket when they are not free.

    AgentError when the host lacks them, or when they are not free, with who has them.
    """
    sight = see_for(plan, env)
    if plan["allow_busy"]:
        return _beside(plan, sight)
    with claiming() as claims:
        seen = of_others(claims.read(), plan)
        number = min(max((c.number for c in seen), default=0) + 1, MAX_NUMBER)
        mine = Claim(TICKET, plan["job_id"], _devices(sight), nvidia.auto_count(plan["gpus"]), number, file=_MINE)
        chosen = grant([*seen, mine], sight.gpus, sight.busy()).get(_MINE)
        if chosen is not None:
            return lease(claims, plan, chosen, sight)
        if (plan.get("policy") or {}).get("queue"):
            return claims.hold(mine)
    raise _refused(queue_view(mine, seen, sight), seen, sight)


@contextmanager
def claimed(plan: Dict[str, Any], env: Dict[str, str]) -> Iterator[Held]:
    """The same while a supervisor is started, which holds them then by itself."""
    held = claim_gpus(plan, env)
    try:
        yield held
    finally:
        held.release()


def would_get(plan: Dict[str, Any], env: Dict[str, str]) -> str:
    """The GPUs that a plan would get now, as CUDA_VISIBLE_DEVICES has them; those of `auto:N` though they be busy."""
    sight = see_for(plan, env)
    return _visible(plan, _choose_beside(plan, sight), sight)


def report(root: Root, call: Call) -> Dict[str, Any]:
    """The host's GPUs, who holds and uses each, and the queue."""
    sight, claims = nvidia.see([], dict(os.environ)), read_claims()
    rows = []
    for gpu in sight.gpus:
        holding = [c for c in claims if c.kind != TICKET and any_overlap(gpu.device, c.devices)]
        rows.append(
            {
                **gpu._asdict(),
                "held": [
                    {"job": c.job, "user": c.user, "since": c.since, "shared": c.kind == SHARED, "devices": c.devices}
                    for c in holding
                ],
                "processes": [h._asdict() for h in sight.using if h.gpu_uuid == gpu.uuid],
            }
        )
    index_of = {gpu.uuid: str(gpu.index) for gpu in sight.gpus}
    queue = [
        {
            "job": t.job,
            "user": t.user,
            "since": t.since,
            "wants": "auto:%d" % t.auto if t.auto else ",".join(index_of.get(d, d) for d in t.devices),
        }
        for t in queue_of(claims)
    ]
    call.send_event("gpus", {"gpus": rows, "queue": queue})
    return {}


# --- parts ------------------------------------------------------------------------------------------------------------


def see_for(plan: Dict[str, Any], env: Dict[str, str]) -> Sight:
    on_cpu = "target.device=cpu" if plan["kind"] == "trainer" else "--device cpu"
    return nvidia.see(plan["gpus"], env, on_cpu=on_cpu)


def of_others(claims: Sequence[Claim], plan: Dict[str, Any], *, but: str = "") -> List[Claim]:
    """Without the job's own: a launch that was cut off is done again beside what is left of it."""
    mine = (plan["job_id"], os.geteuid())
    return [c for c in claims if (c.job, c.uid) != mine or c.file == but]


def _devices(sight: Sight) -> Any:
    return tuple(gpu.device for gpu in sight.named)


def lease(claims: Claims, plan: Dict[str, Any], devices: Any, sight: Sight, kind: str = LEASE) -> Held:
    held = claims.hold(Claim(kind, plan["job_id"], devices))
    held.visible = _visible(plan, devices, sight)
    return held


def _visible(plan: Dict[str, Any], devices: Sequence[str], sight: Sight) -> str:
    """CUDA_VISIBLE_DEVICES: as the plan names them, or the indices that were chosen for it."""
    if not nvidia.auto_count(plan["gpus"]):
        return ",".join(plan["gpus"])
    return ",".join(gpu.label for gpu in sight.gpus if gpu.device in devices)


def _beside(plan: Dict[str, Any], sight: Sight) -> Held:
    """A claim that keeps nobody out. It is not worth a refusal when it cannot be made."""
    devices = _choose_beside(plan, sight)
    try:
        with claiming() as claims:
            return lease(claims, plan, devices, sight, SHARED)
    except AgentError:
        held = Held(Claim(SHARED, plan["job_id"], devices), -1)
        held.visible = _visible(plan, devices, sight)
        return held


def _choose_beside(plan: Dict[str, Any], sight: Sight) -> Any:
    count = nvidia.auto_count(plan["gpus"])
    if not count:
        return _devices(sight)
    try:
        leased = [device for c in read_claims() if c.kind != TICKET for device in c.devices]
    except AgentError:
        leased = []
    return freest(sight.gpus, count, [*leased, *sight.busy()])


def _refused(view: Dict[str, Any], claims: Sequence[Claim], sight: Sight) -> AgentError:
    taken = [d for c in claims for d in (c.devices or [g.device for g in sight.gpus]) if c.kind != SHARED]
    taken += list(sight.busy())
    free = [gpu.label for gpu in sight.gpus if not any_overlap(gpu.device, taken)]
    offer = "free: --gpus %s; " % ",".join(free) if free else ""
    hint = offer + "wait for them with --queue, or run beside them with --allow-busy"
    return AgentError("host", refusal(view, time.time()), hint)
