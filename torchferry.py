"""Torchferry from Python: launch a job on a host, follow it, look at its numbers, bring its results home.

    import torchferry

    job = torchferry.launch("configs/02_debug_sft_fsdp.py", host="gpu", gpus=[0, 1], overrides={"train.steps": 200})
    result = job.wait()             # prints the log; raises JobFailed with the reason
    job.metrics()[-1]["loss"]

Every error of Torchferry's own is a FerryError, with `message`, `where`, `hint` and a `code` that stays
(docs/automation.md lists them). Nothing here asks a question where there is no terminal, ends the process or touches
its signals. A job is a config or a program of the project's folder; a function of one's own cannot be one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deployer.api.values import JobFailed, JobInfo, JobStatus, Result
from deployer.errors import (
    ConnectError,
    FerryError,
    HostError,
    HostKeyError,
    LoginRefused,
    LostConnection,
    NotHome,
    ThisMachine,
    UnknownJob,
    UsageError,
)

if TYPE_CHECKING:
    from deployer.api.job import Job
    from deployer.api.launching import job, jobs, launch

__all__ = [
    "ConnectError",
    "FerryError",
    "HostError",
    "HostKeyError",
    "Job",
    "JobFailed",
    "JobInfo",
    "JobStatus",
    "LoginRefused",
    "LostConnection",
    "NotHome",
    "Result",
    "ThisMachine",
    "UnknownJob",
    "UsageError",
    "job",
    "jobs",
    "launch",
]

_LATER = {
    "Job": "deployer.api.job",
    "job": "deployer.api.launching",
    "jobs": "deployer.api.launching",
    "launch": "deployer.api.launching",
}
"""What waits until it is used, so that an import costs nothing."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    found = globals()[name] = getattr(import_module(_LATER[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
