"""The doctor: checks what on this host would make a job fail, and what to do about it.

Facts are read once, slow ones (nvidia-smi, interpreters) at the same time as the rest; the checks themselves are pure.
Stdlib only, Python 3.8: this package runs on the host.
"""

import glob
import math
import os
import resource
import shutil
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Tuple

from ..gpus import leases, places
from ..gpus.health import read_kernel_log
from ..host.cgroups import read_limits
from ..host.disk import read_disk
from ..host.environment import container_env, hub_folder, job_environment
from ..host.files import read_meminfo, read_text
from ..host.layout import Root
from ..host.machine import this_machine
from ..job.views import Row
from ..python import find
from ..requests.jobs import list_jobs
from ..wire.conversation import Call
from . import check_gpus, check_host, check_root
from .check_host import Python
from .findings import Check, Found, run_check

Examination = Tuple[str, Callable[[], Found]]


class _DoctorRequest(NamedTuple):
    client_time: Optional[float] = None


def doctor(root: Root, call: Call) -> None:
    """Sends facts about this host, and its checks with hints."""
    env = job_environment(dict(os.environ), container_env())
    facts, checks = examine(root, env, client_time=call.read(_DoctorRequest).client_time)
    call.send_event("doctor", {"facts": facts, "checks": checks})


def examine(root: Root, env: Dict[str, str], *, client_time: Optional[float]) -> Tuple[Dict[str, Any], List[Check]]:
    """The host's facts, and all findings in the order in which a launch needs their subjects."""
    now = time.time()
    with ThreadPoolExecutor(8) as pool:
        gpu_facts = pool.submit(check_gpus.read_gpus, env, pool)
        pythons = pool.submit(_read_pythons, root, env)
        jobs = pool.submit(list_jobs, root)
        garbage = pool.submit(check_root.read_garbage, root)
        list_of = [
            *_group("session", lambda: _session(None if client_time is None else now - client_time)),
            *_group("root", lambda: _root(root)),
            ("python", lambda: check_host.check_python(pythons.result(), sys.version.split()[0])),
            *_group("gpus", lambda: _gpus(gpu_facts.result())),
            ("torch", lambda: check_gpus.check_torch(pythons.result())),
            ("torch and driver", lambda: check_gpus.check_cuda(pythons.result(), gpu_facts.result())),
            ("installer", lambda: check_host.check_installer(_which("uv", env), pythons.result())),
            *_group("limits", _limits),
            ("NCCL interface", lambda: check_host.check_network(check_host.read_network(), env)),
            ("Hugging Face cache", lambda: _hub(env)),
            ("gpu leases", lambda: _leases(jobs.result())),
            ("jobs", lambda: check_root.check_jobs(jobs.result())),
            ("leftovers", lambda: check_root.check_garbage(garbage.result())),
        ]  # type: List[Examination]
        checks = [found for name, check in list_of for found in run_check(name, check)]
        return {**host_facts(root), **_gpu_facts(gpu_facts)}, checks


def _group(name: str, read: Callable[[], List[Examination]]) -> List[Examination]:
    """The checks of facts that are read together; one finding with this name if they cannot be read."""
    try:
        return read()
    except Exception as error:
        broken = error
        return [(name, lambda: _raise(broken))]


def _raise(error: Exception) -> Check:
    raise error


def _read_pythons(root: Root, env: Dict[str, str]) -> List[Python]:
    return [Python(*found) for found in find.list_pythons(check_gpus.PACKAGES, env=env, root=root)]


def _which(program: str, env: Dict[str, str]) -> Optional[str]:
    return shutil.which(program, path=env.get("PATH", os.defpath))


def _gpu_facts(reading: "Future[check_gpus.GpuFacts]") -> Dict[str, Any]:
    if reading.exception() is not None:
        return {"gpus": [], "driver": str(reading.exception())}
    facts = reading.result()
    gpus = [gpu._asdict() for gpu in facts.gpus]
    return {"gpus": gpus, "driver": facts.report.driver, "cuda": facts.report.cuda}


def _session(ahead_s: Optional[float]) -> List[Examination]:
    user = user_name()
    shell = login_shell()
    container = container_env()
    lingers = os.path.exists("/var/lib/systemd/linger/" + user)
    clock = [] if ahead_s is None else [("clock", lambda: check_host.check_clock(ahead_s))]
    return [
        ("login shell", lambda: check_host.check_shell(shell, runs=is_shell(shell))),
        *clock,
        ("logout", lambda: check_host.check_logout(read_logind(), user=user, lingers=lingers)),
        ("other users", lambda: check_host.check_hidden(os.path.exists("/proc/1"))),
        (
            "container environment",
            lambda: check_host.check_container(container, missing=missing_folders(container)),
        ),
    ]


def _root(root: Root) -> List[Examination]:
    disk = read_disk(root.path)
    tmp = read_disk(os.environ.get("TMPDIR") or "/tmp")
    no_venv = "environments that are built there do not run: --remote-root DIR, or --python PATH"
    no_compile = "torch.compile and triton build there: --env TMPDIR=DIR"
    return [
        ("root", lambda: check_root.check_root(root)),
        ("root file system", lambda: check_root.check_root_file_system(disk)),
        ("root disk", lambda: check_root.check_root_disk(disk)),
        ("root inodes", lambda: check_root.check_root_inodes(disk)),
        ("root programs", lambda: check_host.check_noexec("root programs", disk, no_venv)),
        ("temporary folder", lambda: check_host.check_noexec("temporary folder", tmp, no_compile)),
    ]


def _gpus(facts: check_gpus.GpuFacts) -> List[Examination]:
    if not facts.gpus:
        return [("driver", lambda: check_gpus.check_driver(facts))]
    return [
        ("driver", lambda: check_gpus.check_driver(facts)),
        ("gpus", lambda: check_gpus.check_gpus(facts)),
        ("gpu limit", lambda: check_gpus.check_gpu_limit(facts)),
        ("gpu memory", lambda: check_gpus.check_gpu_memory(facts)),
        ("gpu errors", lambda: check_gpus.check_gpu_errors(facts)),
        ("gpu faults", lambda: check_gpus.check_kernel_log(read_kernel_log())),
        ("gpu persistence", lambda: check_gpus.check_persistence(facts)),
    ]


def _limits() -> List[Examination]:
    limits = read_limits()
    memory = read_meminfo()
    overcommit = read_text("/proc/sys/vm/overcommit_memory").strip()
    shm = read_disk("/dev/shm") if os.path.isdir("/dev/shm") else None
    seen = len(os.sched_getaffinity(0))
    infiniband = sorted(os.path.basename(path) for path in glob.glob("/sys/class/infiniband/*"))
    files, locked, processes = (
        resource.getrlimit(kind) for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK, resource.RLIMIT_NPROC)
    )
    return [
        ("memory", lambda: check_host.check_memory(memory_bytes(), limits)),
        ("CPUs", lambda: check_host.check_cpus(seen, limits)),
        ("swap", lambda: check_host.check_swap(memory.get("SwapTotal", 0), memory.get("SwapFree", 0))),
        ("overcommit", lambda: check_host.check_overcommit(overcommit, memory.get("CommitLimit", 0))),
        ("/dev/shm", lambda: check_host.check_shm(shm)),
        ("open files", lambda: check_host.check_open_files(*files)),
        ("locked memory", lambda: check_host.check_locked_memory(locked[0], infiniband=infiniband)),
        ("processes", lambda: check_host.check_processes(processes[0], limits)),
    ]


def _leases(jobs: List[Row]) -> Check:
    return check_root.check_leases(leases.read_claims(), jobs, exposed=places.exposed())


def _hub(env: Dict[str, str]) -> Check:
    folder = hub_folder(env)
    models = len(glob.glob(os.path.join(glob.escape(folder), "models--*")))
    return check_host.check_hub(read_disk(folder), models)


# --- facts ------------------------------------------------------------------------------------------------------------


def host_facts(root: Root) -> Dict[str, Any]:
    """Name, system and sizes of this host, flat; sizes in GiB. Contains no secrets."""
    disk = read_disk(root.path)
    limit = read_limits().memory_bytes
    memory = min(memory_bytes(), limit) if limit is not None else memory_bytes()
    return {
        "machine_id": this_machine(),
        "hostname": os.uname().nodename,
        "user": user_name(),
        "shell": login_shell(),
        "kernel": "%s %s" % (os.uname().sysname, os.uname().release),
        "python": "%s (%s)" % (sys.version.split()[0], sys.executable),
        "cpus": cpu_count(),
        "mem_gib": _gib(memory),
        "root": root.path,
        "container_env": sorted(container_env()),
        "disk_free_gib": _gib(disk.free_bytes),
        "inodes_free": disk.inodes_free,
    }


def user_name() -> str:
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def login_shell() -> str:
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_shell
    except KeyError:
        return os.environ.get("SHELL", "")


def cpu_count() -> int:
    """CPUs that this session may use: its affinity, and its container's quota rounded up."""
    seen, quota = len(os.sched_getaffinity(0)), read_limits().cpus
    return seen if quota is None else min(seen, max(1, math.ceil(quota)))


def memory_bytes() -> int:
    """Physical memory of the machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def read_logind() -> List[str]:
    """The texts of logind's configuration, in their order of precedence."""
    paths = ["/etc/systemd/logind.conf", *sorted(glob.glob("/etc/systemd/logind.conf.d/*.conf"))]
    return [read_text(path) for path in paths]


def missing_folders(env: Mapping[str, str]) -> List[str]:
    """The variables for one folder whose folder does not exist."""
    names = ("VIRTUAL_ENV", "CONDA_PREFIX", "CUDA_HOME", "HF_HOME")
    return [name for name in names if env.get(name) and not os.path.isdir(env[name])]


def is_shell(path: str) -> bool:
    return shutil.which(path) is not None and os.path.basename(path) not in ("nologin", "false")


def _gib(size: int) -> float:
    return round(size / (1 << 30), 1)
