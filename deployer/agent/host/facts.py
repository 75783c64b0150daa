"""What this host is: name, sizes, file systems, what its kernel and its login manager say.

Stdlib only, Python 3.8, Linux.
"""

import glob
import math
import os
import shutil
import sys
from typing import Any, Dict, List, Mapping, Optional

from .cgroups import read_limits
from .disk import read_disk
from .environment import container_env
from .files import read_text
from .layout import Root
from .machine import this_machine


def host_facts(root: Root) -> Dict[str, Any]:
    """Name, system and sizes of this host, flat; sizes in GiB. Nothing that could be secret."""
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
    """The machine's."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def read_meminfo() -> Dict[str, int]:
    """/proc/meminfo, in bytes."""
    rows = [line.split() for line in read_text("/proc/meminfo").splitlines()]
    return {row[0].rstrip(":"): int(row[1]) << 10 for row in rows if len(row) == 3 and row[1].isdigit()}


def read_kernel_log() -> Optional[str]:
    """The kernel's messages as far as it keeps them; None when this user may not read them."""
    import ctypes

    read_all, size = 3, 1 << 20
    text = ctypes.create_string_buffer(size)
    try:
        length = ctypes.CDLL(None).klogctl(read_all, text, size)
    except AttributeError:
        return None
    return text.raw[:length].decode("utf-8", "replace") if length >= 0 else None


def read_logind() -> List[str]:
    """The texts of logind's configuration, in the order in which they count."""
    paths = ["/etc/systemd/logind.conf", *sorted(glob.glob("/etc/systemd/logind.conf.d/*.conf"))]
    return [read_text(path) for path in paths]


def missing_folders(env: Mapping[str, str]) -> List[str]:
    """Which of the variables that name one folder name one that is not there."""
    names = ("VIRTUAL_ENV", "CONDA_PREFIX", "CUDA_HOME", "HF_HOME")
    return [name for name in names if env.get(name) and not os.path.isdir(env[name])]


def hub_folder(env: Mapping[str, str]) -> str:
    """Hugging Face's cache of models."""
    caches = env.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    home = env.get("HF_HOME") or os.path.join(caches, "huggingface")
    return env.get("HF_HUB_CACHE") or os.path.join(home, "hub")


def is_shell(path: str) -> bool:
    return shutil.which(path) is not None and os.path.basename(path) not in ("nologin", "false")


def _gib(size: int) -> float:
    return round(size / (1 << 30), 1)
