"""The jobs of this host in short, as `ps` shows them.

Stdlib only, Python 3.8: this package runs on the host.
"""

import time
from typing import Any, Dict, List, Optional

from ..host.files import read_json
from ..host.layout import Job, Root
from . import progress
from .judge import judge
from .status import LOST, TOOL_FAILED, gpus_of

_SHOWN = (
    "state",
    "code",
    "reason",
    "on_host",
    "attempt",
    "max_attempts",
    "queue",
    "started_at",
    "ended_at",
)


def list_jobs(root: Root) -> List[Dict[str, Any]]:
    """One summary per job of this root, newest first. A broken job folder is listed as lost, never an error."""
    return sorted((_summary(job) for job in root.all_jobs()), key=lambda s: (s["created"], s["id"]), reverse=True)


def _summary(job: Job) -> Dict[str, Any]:
    try:
        status = judge(job)
    except OSError as e:
        status = {"state": LOST, "code": TOOL_FAILED, "reason": "the job folder is broken: %s" % e}
    record = read_json(job.record) or {}
    plan = record.get("plan")
    plan = plan if isinstance(plan, dict) else {}
    supervisor = status.get("supervisor")
    return {
        **{key: status.get(key) for key in _SHOWN},
        "id": job.id,
        "unsupervised": bool(status.get("unsupervised")),
        "name": str(plan.get("name", "")),
        "kind": plan.get("kind"),
        "created": str(plan.get("created", "")),
        "age_s": _age_s(record),
        "gpus": gpus_of(plan, status),
        "nproc": plan.get("nproc"),
        "host": supervisor.get("hostname") if isinstance(supervisor, dict) else None,
        "step": progress.last_step(job),
    }


def _age_s(record: Dict[str, Any]) -> Optional[float]:
    """Seconds since the job was made, by this host's clock; the client's may differ."""
    created = record.get("created_at")
    return max(0.0, time.time() - created) if isinstance(created, (int, float)) else None
