"""Where everything of Torchferry lies on a host: one class knows the root's folders, one a job's files.

Stdlib only, Python 3.8: this package runs on the host.
"""

import os
import re
from typing import Iterable, List, Sequence

FORMAT_VERSION = 1
"""Of job.json; a newer client drives older jobs."""

CHECKPOINT_MARKER = "COMPLETE"  # as in trainer/schema: written last into a checkpoint, removed first

JOB_ID_ENV = "TORCHFERRY_JOB_ID"  # marks every process of a job
RUN_DIR_ENV = "TORCHFERRY_RUN_DIR"  # the job folder
ATTEMPT_ENV = "TORCHFERRY_ATTEMPT"  # "1", "2", ...: the log folder's number
CACHE_ENV = "TORCHFERRY_CACHE"  # as in trainer/schema: Root.cache
STARTED_ENV = "TORCHFERRY_STARTED_S"  # as in trainer/schema: when the attempt began, by the boot clock
RESTARTED_ENV = "TORCHFERRY_RESTARTED"  # "1" in an attempt that the supervisor began by itself after a failure

SUPERVISOR_ENV = "TORCHFERRY_SUPERVISES"  # marks a job's supervisor with the job folder

AGENT_DIR = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
"""This agent's own folder, with `rank.py` at its top: ROOT/agent/HASH/agent on a host."""

LEASE_NAME = r"job-([a-z0-9][a-z0-9._-]{0,79})-[0-9a-f]{16}\.lock\Z"
"""A pattern of a lease's file name, behind what the folder adds (`gpus/places.py`); its group is the job's id."""

JOB_ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,79}\Z")


def matching_ids(typed: str, ids: Iterable[str]) -> List[str]:
    """Those that somebody may mean: the id itself, else all that begin with it, else all that end with it."""
    names = [name for name in ids if JOB_ID.match(name)]
    exact = [name for name in names if name == typed]
    return exact or [n for n in names if n.startswith(typed)] or [n for n in names if n.endswith(typed)]


def name_ids(ids: Sequence[str]) -> str:
    """`9 jobs: a, b, c, d, e, f and 3 more`."""
    more = " and %d more" % (len(ids) - 6) if len(ids) > 6 else ""
    return "%d jobs: %s%s" % (len(ids), ", ".join(ids[:6]), more)


class Root:
    """The folder on the host that holds agents, code, environments and jobs (`~/.torchferry` unless set)."""

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(os.path.expanduser(path))
        self.blobs = os.path.join(self.path, "store", "blobs")
        self.trees = os.path.join(self.path, "store", "trees")
        self.packs = os.path.join(self.path, "store", "packs")
        self.data = os.path.join(self.path, "data")
        self.agents = os.path.join(self.path, "agent")
        self.envs = os.path.join(self.path, "envs")
        self.cache = os.path.join(self.path, "cache")  # what trainers have compiled: see trainer/start/caches.py
        self.jobs = os.path.join(self.path, "jobs")
        self.tmp = os.path.join(self.path, "tmp")

    def job(self, job_id: str) -> "Job":
        if not JOB_ID.match(job_id):
            raise ValueError("not a job id: %r" % job_id)
        return Job(os.path.join(self.jobs, job_id))

    def all_jobs(self) -> List["Job"]:
        """Every job folder of this root; what `gc` is removing is none."""
        try:
            names = os.listdir(self.jobs)
        except OSError:
            return []
        paths = [os.path.join(self.jobs, name) for name in names if not name.startswith(".")]
        return [Job(path) for path in paths if os.path.isdir(path)]


class Job:
    """The files of one job. `job.json` and `control/` are written by the agent, `status.json` and `logs/` by the
    supervisor, `ranks/` by the rank wrappers, the rest by the trainer."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.id = os.path.basename(path)
        self.record = os.path.join(path, "job.json")
        self.config = os.path.join(path, "config.yaml")
        self.code = os.path.join(path, "code")
        self.lib = os.path.join(path, "lib")  # the client's own trainer, for projects that have none
        self.status = os.path.join(path, "status.json")
        self.outcome = os.path.join(path, "outcome.json")
        self.metrics = os.path.join(path, "metrics.jsonl")
        self.control = os.path.join(path, "control")
        self.stop = os.path.join(path, "control", "stop.json")
        self.lock = os.path.join(path, "control", "launch.lock")
        self.reserve = os.path.join(path, "control", "reserve")
        self.supervisor_log = os.path.join(path, "control", "supervisor.log")

    def logs(self, attempt: int) -> str:
        """Folder with prepare.log, launcher.log and rank_N.log, raw bytes."""
        return os.path.join(self.path, "logs", "attempt_%d" % attempt)

    def ranks(self, attempt: int) -> str:
        """Folder with rank_N.json: who the rank is, and how it ended."""
        return os.path.join(self.path, "ranks", "attempt_%d" % attempt)
