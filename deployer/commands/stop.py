"""`stop`."""

from __future__ import annotations

from typing import Any

from deployer import jobs, render
from deployer.agent.state import FINAL
from deployer.host import Host


def stop(host: Host, job_id: str, *, grace_s: float) -> int:
    """Stops a job; 0 when nothing of it remains, 1 when something does."""
    told = False

    def tell(status: dict[str, Any]) -> None:
        nonlocal told
        if not told:  # a job that has ended tells nothing
            render.notice(f"stopping {job_id}: up to {grace_s:g} s to save (--grace)")
            told = True
        phase = status.get("phase")
        if phase:
            render.notice(f"  {render.clean(phase)}")

    final = jobs.stop_job(host, job_id, grace_s=grace_s, on_state=tell)
    if final.get("was") in FINAL:
        render.notice(f"{final['job_id']} had ended already: {final['state']}")
        return 0
    remaining = final.get("remaining") or []
    for process in remaining:
        render.notice(f"  still there: pid {process.get('pid')} {render.clean(process.get('cmdline'))}")
    if final.get("gpus_free") is False:
        render.notice("  its GPUs are not free: nvidia-smi on the host shows who holds them")
    render.notice(f"{final['job_id']} {final['state']}")
    return 1 if remaining or final.get("gpus_free") is False else 0
