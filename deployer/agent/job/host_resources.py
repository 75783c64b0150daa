"""The host's resources that a job uses: file systems while it runs, and also memory, limits and GPUs at a failure.

Stdlib only, Python 3.8, Linux.
"""

import os
import resource
import threading
import time
from typing import Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple, TypeVar

from ..host.cgroups import read_limits, read_refused_forks
from ..host.disk import NETWORK_KINDS, existing_folder, mount_of
from ..host.environment import hub_folder
from ..host.files import read_meminfo, read_text

T = TypeVar("T")

FIRST_S, SAMPLE_S = 1.0, 5.0
_RLIMITS = {"open_files": "NOFILE", "processes": "NPROC", "address_space": "AS", "file_bytes": "FSIZE", "cpu_s": "CPU"}
ANSWER_S = 12.0
"""Seconds to wait for a network file system or a driver, which may never answer; the verdict waits no longer."""


class FileSystemUsage(NamedTuple):
    """A file system that the job uses, and its smallest free space since the job's start."""

    path: str
    uses: Tuple[str, ...]
    """What the job has there: `the job folder`."""
    free_bytes: int
    inodes_free: Optional[int] = None
    """None if the file system does not count them."""
    read_only: bool = False
    least_bytes: Optional[int] = None
    least_inodes: Optional[int] = None


class Limits(NamedTuple):
    """None means no limit."""

    open_files: Optional[int] = None
    processes: Optional[int] = None
    """The limit of this user."""
    address_space: Optional[int] = None
    file_bytes: Optional[int] = None
    cpu_s: Optional[int] = None
    group_memory: Optional[int] = None
    """The limit of the control group, like the next ones."""
    group_processes: Optional[int] = None
    group_used: int = 0
    forks_refused: int = 0
    """How often a fork was refused so far."""
    commits: bool = False
    """vm.overcommit_memory=2: processes cannot reserve more memory than exists."""


class MemoryUsage(NamedTuple):
    total: int = 0
    free: int = 0


class Gpus(NamedTuple):
    """The faults of the job's GPUs, as text."""

    gone: Tuple[str, ...] = ()
    driver: str = ""
    """Why the driver does not answer."""
    faults: Tuple[str, ...] = ()
    others: Tuple[str, ...] = ()
    """Other processes that compute on them."""


class HostResources(NamedTuple):
    file_systems: Tuple[FileSystemUsage, ...] = ()
    limits: Limits = Limits()
    memory: MemoryUsage = MemoryUsage()
    gpus: Gpus = Gpus()


# --- reading ----------------------------------------------------------------------------------------------------------


def places(job_path: str, cache: str, env: Mapping[str, str]) -> Dict[str, str]:
    """Folders that a job writes to: path -> its purpose."""
    return {
        job_path: "the job folder",
        env.get("TMPDIR") or "/tmp": "the temporary folder",
        "/dev/shm": "/dev/shm",
        hub_folder(env): "the Hugging Face cache",
        cache: "the cache of compiled code",
        env.get("HOME") or os.path.expanduser("~"): "the home folder",
    }


def read_file_systems(found: Mapping[str, str], *, network_too: bool = True) -> Tuple[FileSystemUsage, ...]:
    """The file systems of these paths, each once. Leaves out one that cannot be read. Without `network_too`, also
    leaves out one that another machine serves, which may never answer; the first path's is always read."""
    file_systems: Dict[int, FileSystemUsage] = {}
    mounts = "" if network_too else read_text("/proc/mounts")
    for number, (path, use) in enumerate(found.items()):
        if number and not network_too and mount_of(path, mounts)[0] in NETWORK_KINDS:
            continue
        try:
            folder = existing_folder(path)
            device, status = os.stat(folder).st_dev, os.statvfs(folder)
        except OSError:
            continue
        if device in file_systems:
            fs = file_systems[device]
            uses = fs.uses if use in fs.uses else (*fs.uses, use)
            file_systems[device] = fs._replace(uses=uses)
            continue
        # root may use the reserved space
        free = (status.f_bavail if os.geteuid() else status.f_bfree) * status.f_frsize
        file_systems[device] = FileSystemUsage(
            path,
            (use,),
            free,
            status.f_favail if status.f_files else None,
            bool(status.f_flag & os.ST_RDONLY),
        )
    return tuple(file_systems.values())


def read_own_limits() -> Limits:
    """The limits of this process, which its children inherit, and of its control group."""
    group = read_limits()
    own = {field: _limit(name) for field, name in _RLIMITS.items()}
    return Limits()._replace(
        **own,
        group_memory=group.memory_bytes,
        group_processes=group.pids,
        group_used=group.pids_used,
        forks_refused=read_refused_forks(),
        commits=read_text("/proc/sys/vm/overcommit_memory").strip() == "2",
    )


def _limit(name: str) -> Optional[int]:
    soft = resource.getrlimit(getattr(resource, "RLIMIT_" + name))[0]
    return None if soft == resource.RLIM_INFINITY else soft


def read_memory() -> MemoryUsage:
    found = read_meminfo()
    return MemoryUsage(found.get("MemTotal", 0), found.get("MemAvailable", 0))


def read_gpus(devices: Sequence[str], env: Dict[str, str], ours: Sequence[int], since_boot_s: float) -> Gpus:
    """`devices`: as they are leased. `ours`: the job's PIDs. Kernel messages before `since_boot_s` are ignored."""
    from ..gpus import health, nvidia
    from ..host.errors import AgentError

    log = health.read_kernel_log() or ""
    xids = [x for x in health.read_xids(log) if x.boot_s is not None and x.boot_s >= since_boot_s]
    faults = [x.line[:200] for x in xids if x.number in health.HARDWARE_XIDS][-2:]
    try:
        listed, using = nvidia.list_gpus(env), nvidia.holders(env)
        cards = {card.uuid: card for card in health.read_report(env).cards}
    except AgentError as error:
        return Gpus(driver=error.message, faults=tuple(faults))
    wanted = [device.partition("/")[0] for device in devices]
    here = {gpu.uuid: gpu for gpu in listed}
    for gpu in (here[uuid] for uuid in wanted if uuid in here):
        card = cards.get(gpu.uuid)
        if card is not None and (card.uncorrectable or card.broken):
            what = "%d uncorrectable memory errors" % card.uncorrectable if card.uncorrectable else "broken memory"
            faults.append("GPU %s has %s" % (gpu.label, what))
    rest = [holder for holder in using if holder.pid not in ours and holder.user != "?"]
    asked = [here[uuid]._replace(memory_used_mib=0) for uuid in wanted if uuid in here]
    others = ["GPU %s: %s" % (gpu.label, who) for gpu in asked for who in [nvidia.users_of(gpu, rest)] if who]
    return Gpus(tuple(uuid for uuid in wanted if uuid not in here), "", tuple(faults), tuple(others))


def in_time(read: Callable[[], T], default: T, *, timeout_s: float = ANSWER_S) -> T:
    """The result of `read`; `default` if it takes longer than `timeout_s` or fails."""
    found: List[T] = []

    def run() -> None:
        try:
            found.append(read())
        except Exception:  # whatever a host's files say, the verdict must be written
            return

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return found[0] if found else default


# --- during an attempt ------------------------------------------------------------------------------------------------


class ResourceMonitor:
    """Samples the file systems while the job runs, and reads all resources at a failure."""

    def __init__(self, found: Mapping[str, str]) -> None:
        self._places = dict(found)
        self._least: Dict[str, Tuple[int, Optional[int]]] = {}
        self.start = HostResources(self._file_systems(), Limits(forks_refused=read_refused_forks()))
        self.began_s = time.monotonic()
        self._next = self.began_s + FIRST_S

    def sample(self) -> bool:
        """Call it often. Returns whether it took a sample."""
        if time.monotonic() < self._next:
            return False
        self._file_systems()
        self._next = time.monotonic() + SAMPLE_S
        return True

    def at_failure(self, named: Sequence[str], gpus: Callable[[], Gpus]) -> HostResources:
        """The resources at the failure. `named`: files in the job's last log lines."""
        where = {**self._places, **{path: os.path.dirname(path) for path in named}}
        none: Tuple[FileSystemUsage, ...] = ()
        file_systems = in_time(lambda: read_file_systems(where), none, timeout_s=2.0) or self._file_systems()
        told = tuple(self._with_least(fs) for fs in file_systems)
        limits, memory = read_own_limits(), read_memory()
        return HostResources(told, limits, memory, in_time(gpus, Gpus(driver="nvidia-smi gives no answer")))

    def _file_systems(self) -> Tuple[FileSystemUsage, ...]:
        file_systems = read_file_systems(self._places, network_too=False)
        for fs in file_systems:
            self._least[fs.path] = self._least_of(fs)
        return file_systems

    def _with_least(self, fs: FileSystemUsage) -> FileSystemUsage:
        least, inodes = self._least_of(fs)
        return fs._replace(least_bytes=least, least_inodes=inodes)

    def _least_of(self, fs: FileSystemUsage) -> Tuple[int, Optional[int]]:
        before, inodes = self._least.get(fs.path, (fs.free_bytes, fs.inodes_free))
        fewer = [n for n in (inodes, fs.inodes_free) if n is not None]
        return min(before, fs.free_bytes), min(fewer, default=None)
