"""What this host is, and the environment that its jobs get.

Stdlib only, Python 3.8: this package runs on the host.
"""

import os
import sys
from typing import Any, Dict, Mapping

from .errors import AgentError
from .layout import Root

_NAMES = ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
_PREFIXES = ("CUDA_", "HF_", "NCCL_", "NVIDIA_", "CONDA_", "UV_")
_LISTS = ("PATH", "LD_LIBRARY_PATH")
_SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL")


def container_env() -> Dict[str, str]:
    """What the host's container was started with, of what matters to a job: sshd's sessions do not inherit it.

    Empty when process 1 is another user's.
    """
    try:
        with open("/proc/1/environ", "rb") as f:
            return parse_container_env(f.read())
    except OSError:
        return {}


def parse_container_env(data: bytes) -> Dict[str, str]:
    """The variables that matter to a job, of a `/proc/PID/environ`."""
    pairs = [os.fsdecode(item).partition("=") for item in data.split(b"\0") if b"=" in item]
    return {name: value for name, _, value in pairs if name in _NAMES or name.startswith(_PREFIXES)}


def job_environment(session_env: Mapping[str, str], container: Mapping[str, str]) -> Dict[str, str]:
    """The container's environment under the session's; of the lists of folders, the session's entries come first."""
    merged = {**container, **session_env}
    for name in _LISTS:
        parts = [p for env in (session_env, container) for p in env.get(name, "").split(os.pathsep) if p]
        if parts:
            merged[name] = os.pathsep.join(dict.fromkeys(parts))
    return merged


def is_secret(name: str) -> bool:
    """Whether a variable's value must not be shown."""
    return any(word in name.upper() for word in _SECRET)


def host_facts(root: Root) -> Dict[str, Any]:
    """Name, system, sizes and GPUs of this host, flat; sizes in GiB. Nothing that could be secret."""
    from . import state

    container = container_env()
    facts: Dict[str, Any] = {
        "machine_id": state.this_machine(),
        "hostname": os.uname().nodename,
        "user": user_name(),
        "shell": _shell(),
        "kernel": "%s %s" % (os.uname().sysname, os.uname().release),
        "python": "%s (%s)" % (sys.version.split()[0], sys.executable),
        "cpus": cpu_count(),
        "mem_gib": _gib(_memory_bytes()),
        "root": root.path,
        "container_env": sorted(container),
    }
    facts.update(_disk(root))
    facts.update(_gpu_facts(job_environment(os.environ, container)))
    return facts


def existing_folder(path: str) -> str:
    """The path, or the nearest folder above it that exists."""
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return path


def user_name() -> str:
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def _shell() -> str:
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_shell
    except KeyError:
        return os.environ.get("SHELL", "")


def cpu_count() -> int:
    """CPUs that this session may use: its affinity, and its container's quota rounded up."""
    allowed = len(os.sched_getaffinity(0))
    try:
        with open("/sys/fs/cgroup/cpu.max") as f:
            quota, period = f.read().split()
        return min(allowed, max(1, -(-int(quota) // int(period))))
    except (OSError, ValueError):  # no such group, or "max"
        return allowed


def _memory_bytes() -> int:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        with open("/sys/fs/cgroup/memory.max") as f:
            return min(total, int(f.read()))
    except (OSError, ValueError):
        return total


def _disk(root: Root) -> Dict[str, Any]:
    status = os.statvfs(existing_folder(root.path))
    return {"disk_free_gib": _gib(status.f_bavail * status.f_frsize), "inodes_free": status.f_favail}


def _gpu_facts(env: Dict[str, str]) -> Dict[str, Any]:
    from . import gpus

    try:
        return {"gpus": [gpu._asdict() for gpu in gpus.list_gpus(env)], "driver": gpus.query_driver(env)}
    except AgentError as error:
        return {"gpus": [], "driver": error.message}


def _gib(size: int) -> float:
    return round(size / (1 << 30), 1)
