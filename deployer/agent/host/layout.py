"""The paths of Torchferry's files on a host: one class for the root's folders, one for a job's files.

Stdlib only, Python 3.8: this package runs on the host.
"""

import os
import re
from typing import Iterable, List, NamedTuple, Optional, Sequence, Tuple

FORMAT_VERSION = 1
"""The format of job.json; a newer client can use older jobs."""

CHECKPOINT_MARKER = "COMPLETE"  # as in trainer/schema: written last into a checkpoint, removed first

JOB_ID_ENV = "TORCHFERRY_JOB_ID"  # marks every process of a job
RUN_DIR_ENV = "TORCHFERRY_RUN_DIR"  # the job folder
ATTEMPT_ENV = "TORCHFERRY_ATTEMPT"  # "1", "2", ...: the log folder's number
SETUP_ENV = "TORCHFERRY_SETUP_DIR"  # what a job's setup keeps for all jobs that share it
GROUP_ENV = "TORCHFERRY_GROUP"  # the folder of its group of processes; unset where the job has one alone
CACHE_ENV = "TORCHFERRY_CACHE"  # as in trainer/schema: Root.cache
STARTED_ENV = "TORCHFERRY_STARTED_S"  # as in trainer/schema: when the attempt began, by the boot clock
RESTARTED_ENV = "TORCHFERRY_RESTARTED"  # "1" in an attempt that the supervisor began by itself after a failure

BESIDE_ENV = "TORCHFERRY_BESIDE"  # of a command beside a job, the job's folder: it is no process of that job
SUPERVISOR_ENV = "TORCHFERRY_SUPERVISES"  # marks a job's supervisor with the job folder

AGENT_DIR = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
"""This agent's own folder, with `rank.py` at its top: ROOT/agent/HASH/agent on a host."""

LEASE_NAME = r"job-([a-z0-9][a-z0-9._-]{0,79})-[0-9a-f]{16}\.lock\Z"
"""A pattern of a lease's file name after the folder's prefix (`gpus/places.py`); its group is the job's ID."""

JOB_ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,79}\Z")


def matching_ids(typed: str, ids: Iterable[str]) -> List[str]:
    """The IDs that a user may mean: the ID itself, else all that begin with the text, else all that end with it."""
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
        """Every job folder of this root, without those that `gc` is removing and those whose name cannot be a job's."""
        try:
            names = os.listdir(self.jobs)
        except OSError:
            return []
        paths = [os.path.join(self.jobs, name) for name in names if JOB_ID.match(name)]
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
        self.listing = os.path.join(path, "control", "tree")  # of the code, as it came
        self.reserve = os.path.join(path, "control", "reserve")
        self.supervisor_log = os.path.join(path, "control", "supervisor.log")

    def logs(self, attempt: int, folder: str = "") -> str:
        """Folder with prepare.log, launcher.log and rank_N.log, raw bytes. `folder`: that of a group of processes,
        which has a launcher and ranks; prepare.log is shared."""
        return self._of_attempt("logs", attempt, folder)

    def ranks(self, attempt: int, folder: str = "") -> str:
        """Folder with rank_N.json: which process the rank is, and how it ended."""
        return self._of_attempt("ranks", attempt, folder)

    def _of_attempt(self, kind: str, attempt: int, folder: str) -> str:
        top = os.path.join(self.path, kind, "attempt_%d" % attempt)
        return os.path.join(top, folder) if folder else top


# --- the groups of processes of an attempt ----------------------------------------------------------------------------

PREPARE_LOG, LAUNCHER_LOG = "prepare.log", "launcher.log"
TIMES_FILE = "times.jsonl"
"""A file beside the logs: when each byte of them was written."""

_ROLE = r"(?!node[0-9]|attempt_)[a-z][a-z0-9_-]{0,39}\Z"


class GroupName(NamedTuple):
    """A role's processes on one node, by the folder of their files. None means not named: the job has one role, or the
    role one node."""

    role: Optional[str] = None
    node: Optional[int] = None

    @classmethod
    def parse(cls, folder: str) -> "Optional[GroupName]":
        """The group of a folder; None if it is not a group's folder."""
        parts = folder.split("/") if folder else []
        role = parts.pop(0) if parts and re.match(_ROLE, parts[0]) else None
        node = _number_in(parts.pop(0), "node") if parts else None
        found = cls(role, node)
        return found if found.folder == folder else None

    @property
    def folder(self) -> str:
        """The path below an attempt's folder: "", `ROLE`, `nodeK` or `ROLE/nodeK`."""
        return "/".join(self.words)

    @property
    def words(self) -> List[str]:
        return [
            *([self.role] if self.role is not None else []),
            *(["node%d" % self.node] if self.node is not None else []),
        ]

    def rank(self, rank: int) -> str:
        """The name of one of its ranks for a user: `rank 0`, `server node1 rank 0`."""
        return " ".join([*self.words, "rank %d" % rank])

    @property
    def order(self) -> Tuple[str, int]:
        return self.role or "", self.node or 0


ALONE = GroupName()
"""A job's only group."""


class LogName(NamedTuple):
    """The name by which a reader identifies a log: `rank_0.log`, `attempt_2/launcher.log`,
    `attempt_2/server/node1/rank_0.log`; the first attempt has no prefix. `rank_0.log~2` is the second file of this
    name: the content after the first one was truncated or replaced."""

    attempt: int
    group: GroupName
    file: str
    copy: int = 1

    @classmethod
    def parse(cls, text: str) -> "Optional[LogName]":
        """The LogName in a text; None if it is not a log's name."""
        folder, _, file = text.rpartition("/")
        top, _, rest = folder.partition("/")
        attempt = _number_in(top, "attempt_")
        group = GroupName.parse(folder if attempt is None else rest)
        file, _, copy = file.partition("~")
        if group is None or not is_log(file):
            return None
        found = cls(attempt or 1, group, file, _number_in(copy, "") or 1)
        return found if found.text == text else None

    @property
    def text(self) -> str:
        folders = [*(["attempt_%d" % self.attempt] if self.attempt > 1 else []), *self.group.words]
        return "/".join([*folders, self.file + ("~%d" % self.copy if self.copy > 1 else "")])

    @property
    def rank(self) -> Optional[int]:
        """The log's rank; None for a log that does not belong to one rank."""
        return rank_of(self.file, ".log")

    @property
    def writer(self) -> str:
        """The process that writes it, for a user: `rank 0`, `server node1 rank 0`, `server node1 launcher`."""
        if self.rank is not None:
            return self.group.rank(self.rank)
        return " ".join([*self.group.words, self.file[: -len(".log")]])


def is_log(file: str) -> bool:
    return file in (PREPARE_LOG, LAUNCHER_LOG) or rank_of(file, ".log") is not None


def rank_of(file: str, end: str) -> Optional[int]:
    """The rank of rank_N.log or rank_N.json."""
    return _number_in(file[: -len(end)], "rank_") if file.endswith(end) else None


def group_files(top: str) -> List[Tuple[GroupName, str]]:
    """Every regular file of every group below an attempt's folder of logs or records, unordered. Follows no link below
    it, and enters only the folders of groups."""
    found: List[Tuple[GroupName, str]] = []
    groups = [ALONE]
    for group in groups:
        try:
            with os.scandir(os.path.join(top, group.folder)) as entries:
                for entry in entries:
                    if entry.is_file(follow_symlinks=False):
                        found.append((group, entry.name))
                    elif entry.is_dir(follow_symlinks=False):
                        inner = GroupName.parse("/".join([*group.words, entry.name]))
                        groups += [inner] if inner is not None else []
        except OSError:
            continue
    return found


def _number_in(name: str, head: str) -> Optional[int]:
    """N of `headN`, if it is written as a normal number."""
    digits = name[len(head) :]
    is_number = name.startswith(head) and digits.isdecimal() and len(digits) < 10
    return int(digits) if is_number and str(int(digits)) == digits else None
