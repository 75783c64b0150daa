"""Jobs whose supervisor was killed: whoever connects next gives them a new one, and ends what an ended one left over.

Stdlib only, Python 3.8: this package runs on the host.
"""

import time
from typing import Any, Dict

from ..host.errors import AgentError
from ..host.layout import Job, Root
from ..host.locks import locked
from ..host.machine import boot_id, this_machine
from ..host.processes import SWEEP_S, describe, end_all, job_processes
from ..job.judge import judge
from ..job.status import FINAL, supervisor_of, write_status
from ..supervisor import start


def adopt_all(root: Root, *, within_s: float) -> None:
    """Adopts every job of this root and machine that runs unsupervised, and sweeps those that ended so."""
    deadline = time.monotonic() + within_s
    for job in root.all_jobs():
        if time.monotonic() > deadline:
            return
        try:
            status = judge(job)
            if status.get("unsupervised"):
                adopt(job)
            elif _is_unswept(status):
                sweep_ended(job)
        except (AgentError, OSError, KeyError, TypeError, ValueError):
            continue  # a job that is broken must not keep the others waiting


def adopt(job: Job) -> None:
    """Gives the job a new supervisor, which watches what still runs; nothing when another agent was first."""
    try:
        start.adopt(job)
    except AgentError:
        if judge(job).get("unsupervised"):
            raise


def sweep_ended(job: Job) -> Dict[str, Any]:
    """Ends what an ended job left running; its status as it is then. Nothing when it was started again meanwhile."""
    with locked(job):
        status = judge(job)
        if status["state"] not in FINAL:
            return status
        told, remaining = end_all(lambda: job_processes(job), term_s=SWEEP_S, settle_s=0)
        swept = {"swept": int(status.get("swept") or 0) + len(told), "remaining": [describe(p) for p in remaining]}
        final = {**status, **swept}
        if final != status and supervisor_of(status) is not None:
            write_status(job, final)
        return {**final, "ended": len(told) - len(remaining)}


def _is_unswept(status: Dict[str, Any]) -> bool:
    """Whether the job ended on this machine without a supervisor, which would have ended what it left running."""
    identity = supervisor_of(status)
    here = identity is not None and (identity.machine_id, identity.boot_id) == (this_machine(), boot_id())
    return here and status.get("state") in FINAL and "swept" not in status
