"""Real jobs for tests, started by the real supervisor from a plan written by hand."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from deployer.agent.host.layout import Job, Root
from deployer.agent.host.processes import is_running, process_of
from deployer.agent.host.typed import to_json
from deployer.agent.job.judge import judge
from deployer.agent.job.plan import PLAN_VERSION, Plan, Role, parse_plan
from deployer.agent.job.record import Record, write_record
from deployer.agent.job.status import FINAL, Status
from deployer.agent.supervisor.start import LaunchInput, spawn
from tests.support.ferry import Ferry
from tests.support.limits import HANG_S


def wait_for(condition: Callable[[], Any], *, timeout_s: float = HANG_S) -> Any:
    """The first true value of `condition`; fails the test after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    pytest.fail(f"still not so after {timeout_s} s: {condition}")


def make_plan(
    argv: list[Any],
    *,
    kind: str = "program",
    device: str = "cpu",
    gpus: Sequence[str] = (),
    policy: Mapping[str, Any] | None = None,
    job_id: str = "j",
    **changes: Any,
) -> Plan:
    """A plan of one role on one node. `policy`: with `max_restarts`; `changes`: of the role or of the plan."""
    policy = dict(policy or {})
    role: dict[str, Any] = {
        "name": kind,
        "argv": argv,
        "cwd": [{"slot": "job"}, "/code"],
        "env": {},
        "nodes": [{"kind": device, "gpus": list(gpus)}],
        "max_restarts": policy.pop("max_restarts", 0),
    }
    role |= {name: changes.pop(name) for name in list(changes) if name in Role._fields}
    plan = {
        "job_id": job_id,
        "name": "test",
        "created": "2026-01-02T03:04:05Z",
        "roles": [role],
        "python": {"explicit": sys.executable},
        "tree": "",
        "request": {},
        "policy": policy,
    }
    return parse_plan({"version": PLAN_VERSION, **plan, **changes})


def python(code: str, *args: str) -> list[Any]:
    """argv of a job that is a few lines of Python."""
    return [[{"slot": "python"}], "-u", "-c", code, *args]


def torchrun(code: str, nproc: int = 2) -> dict[str, Any]:
    """Plan keys of a job of `nproc` ranks that run a few lines of Python (without torch: they start at once)."""
    launcher = [{"slot": "python"}], "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"
    wrapper = [{"slot": "agent"}, "/rank.py"]
    argv = [*launcher, "--max-restarts", "0", wrapper, "-c", code]
    return {"argv": argv, "torchrun": True, "nproc": nproc}


def make_job(root: Path, job_id: str, plan: Plan) -> Job:
    """The job's folder as the agent leaves it before it starts the supervisor."""
    job = Root(str(root)).job(job_id)
    Path(job.code).mkdir(parents=True)
    Path(job.control).mkdir()
    write_record(job, Record(to_json(plan._replace(job_id=job_id))))
    return job


def start(job: Job, plan: Plan, **more: Any) -> Job:
    more.setdefault("base_env", {**os.environ, "OMP_NUM_THREADS": "1"})
    spawn(job, LaunchInput(plan=plan, **{"attempt": 1, **more}))
    return job


def run_job(root: Path, job_id: str, plan: Plan, **more: Any) -> Status:
    """Starts a job and waits for its final status."""
    return end_of(start(make_job(root, job_id, plan), plan, **more))


def end_of(job: Job, *, timeout_s: float = HANG_S) -> Status:
    def final() -> Status | None:
        status = judge(job)
        return status if status.state in FINAL else None

    status: Status = wait_for(final, timeout_s=timeout_s)
    return status


def log_of(job: Job, name: str = "rank_0.log") -> str:
    path = Path(job.logs(1)) / name
    return path.read_bytes().decode() if path.exists() else ""


def said(job: Job, text: str, name: str = "rank_0.log") -> Any:
    return wait_for(lambda: text in log_of(job, name))


UP = "import time; print('up'); time.sleep(1000)"
"""A program that says `up` and stays."""
GO = "import os, sys, time\nprint('up')\nwhile not os.path.exists('go'): time.sleep(0.02)\n"
"""One that says `up` and stays until there is a file `go` in its code folder."""


def run_up(root: Path, job_id: str, code: str = UP, *args: str, **changes: Any) -> Job:
    """A running job of one process that has said `up`; `changes` are of its plan."""
    plan = make_plan(python(code, *args), **changes)
    job = start(make_job(root, job_id, plan), plan)
    said(job, "up")
    wait_for(lambda: judge(job).state == "running")
    wait_for((Path(job.ranks(1)) / "rank_0.json").exists)  # of its wrapper, which may be slower than the program
    return job


def launch(ferry: Ferry, name: str, code: str = UP) -> str:
    """The id of a detached job of the command line that has said `up`."""
    words = ("run", *ferry.where(), "--detach", "--name", name, "--python", sys.executable, "--", "python", "-uc", code)
    done = ferry.run(*words)
    assert done.returncode == 0, done.stderr.decode()
    (job_id,) = [i for i in ferry.job_ids() if i.startswith(name)]
    said(Job(str(ferry.job(job_id))), "up")
    return job_id


def kill_supervisor(job: Job) -> None:
    supervisor = process_of(supervisor_pid(job))
    os.kill(supervisor.pid, signal.SIGKILL)
    wait_for(lambda: not is_running(supervisor))


def supervisor_pid(job: Job) -> int:
    """As its status has it."""
    supervisor = judge(job).supervisor
    assert supervisor is not None
    return supervisor.pid
