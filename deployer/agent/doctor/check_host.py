"""The doctor's checks of a machine: disk, limits, memory, clock, login, Python, network. Each check is pure: it gets
facts that were read before.

Stdlib only, Python 3.8: this package runs on the host.
"""

import os
import re
import socket
from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence

from ..host.cgroups import Limits
from ..host.disk import Disk
from ..host.environment import is_secret
from ..host.files import read_text
from .findings import FAIL, OK, WARN, Check, check, gigabytes

LOW_DISK_BYTES = 10 * 10**9
LOW_SHM_BYTES = 10**9
LOW_FILES = 4096
LOW_PROCESSES = 4096
LOW_MEMORY_BYTES = 8 * 10**9
CLOCK_S = 10
UNLIMITED = -1
"""As in `resource`."""


# --- disk -------------------------------------------------------------------------------------------------------------


def check_noexec(name: str, disk: Disk, hint: str) -> Check:
    if "noexec" not in disk.options:
        return check(name, OK, "%s: programs may run from there" % disk.path)
    return check(name, WARN, "%s is mounted noexec: no program runs from there" % disk.path, hint)


def check_shm(disk: Optional[Disk]) -> Check:
    if disk is None:
        return check("/dev/shm", WARN, "not there", "NCCL and data loaders need it: docker run --shm-size=8g")
    if disk.size_bytes >= LOW_SHM_BYTES:
        return check("/dev/shm", OK, gigabytes(disk.size_bytes))
    hint = "NCCL and data loaders need more: docker run --shm-size=8g, or --ipc=host"
    return check("/dev/shm", WARN, gigabytes(disk.size_bytes), hint)


def check_hub(disk: Disk, models: int) -> Check:
    """The Hugging Face cache and the free space on its disk."""
    detail = "%s: %d models, %s free" % (disk.path, models, gigabytes(disk.free_bytes))
    if disk.free_bytes >= LOW_DISK_BYTES:
        return check("Hugging Face cache", OK, detail)
    return check("Hugging Face cache", WARN, detail, "put it elsewhere with --env HF_HOME=DIR")


# --- limits -----------------------------------------------------------------------------------------------------------


def check_open_files(soft: int, hard: int) -> Check:
    if soft == UNLIMITED or soft >= LOW_FILES:
        return check("open files", OK, "limit %s" % _limit(soft))
    detail = "limit %d (at most %s)" % (soft, _limit(hard))
    return check("open files", WARN, detail, "data loaders run out of them: ulimit -n, or limits.conf")


def check_locked_memory(soft: int, *, infiniband: Sequence[str]) -> Check:
    if not infiniband:
        return check("locked memory", OK, "no InfiniBand, which would need it")
    if soft == UNLIMITED:
        return check("locked memory", OK, "unlimited, as %s needs it" % ", ".join(infiniband))
    detail = "limit %d kB, and %s registers its buffers in it" % (soft >> 10, ", ".join(infiniband))
    return check("locked memory", WARN, detail, "ulimit -l unlimited, or docker run --ulimit memlock=-1")


def check_processes(soft: int, limits: Limits) -> Check:
    """Threads count too: each rank starts one per CPU, each data-loader worker some more."""
    if limits.pids is not None and limits.pids - limits.pids_used < LOW_PROCESSES:
        detail = "%d of the container's or session's %d are left" % (limits.pids - limits.pids_used, limits.pids)
        return check("processes", WARN, detail, "docker run --pids-limit=-1, or TasksMax= of the systemd unit")
    if soft != UNLIMITED and soft < LOW_PROCESSES:
        return check("processes", WARN, "limit %d for this user" % soft, "raise it: ulimit -u, or limits.conf")
    return check("processes", OK, "limit %s" % _limit(soft if limits.pids is None else limits.pids))


def check_memory(total_bytes: int, limits: Limits) -> Check:
    limit = limits.memory_bytes
    if limit is None or limit >= total_bytes:
        return _check_enough(total_bytes, gigabytes(total_bytes))
    detail = "limit %s of the machine's %s" % (gigabytes(limit), gigabytes(total_bytes))
    if limit >= total_bytes / 2:
        return _check_enough(limit, detail)
    hint = "beyond it a job is killed with signal 9: fewer data-loader workers, or docker run --memory=SIZE"
    return check("memory", WARN, detail, hint)


def _check_enough(size: int, detail: str) -> Check:
    if size >= LOW_MEMORY_BYTES:
        return check("memory", OK, detail)
    return check("memory", WARN, detail, "loading a model may need more: a small one, or another machine")


def check_cpus(seen: int, limits: Limits) -> Check:
    """`seen`: the number of CPUs that programs count (affinity, without the cgroup's limit)."""
    if limits.cpus is None or limits.cpus >= seen:
        return check("CPUs", OK, "%d" % seen)
    detail = "%.3g CPUs may be used, programs see %d" % (limits.cpus, seen)
    hint = "too many threads slow a job down: --env OMP_NUM_THREADS=%d" % max(1, int(limits.cpus))
    return check("CPUs", WARN, detail, hint)


def check_overcommit(mode: str, commit_limit_bytes: int) -> Check:
    if mode != "2":
        return check("overcommit", OK, "vm.overcommit_memory=%s" % (mode or "?"))
    detail = "vm.overcommit_memory=2: no more than %s may be reserved, and CUDA reserves more than it uses"
    return check("overcommit", WARN, detail % gigabytes(commit_limit_bytes), "sysctl vm.overcommit_memory=0")


def check_swap(total_bytes: int, free_bytes: int) -> Check:
    used = total_bytes - free_bytes
    if not total_bytes:
        return check("swap", OK, "none")
    detail = "%s of %s in use" % (gigabytes(used), gigabytes(total_bytes))
    if used < total_bytes / 2 or used < 10**9:
        return check("swap", OK, detail)
    return check("swap", WARN, detail + ": the machine is short of memory", "see who takes it: top, then M")


def _limit(value: int) -> str:
    return "none" if value == UNLIMITED else "%d" % value


# --- the session ------------------------------------------------------------------------------------------------------


def check_shell(shell: str, *, runs: bool) -> Check:
    """`runs`: whether the account's shell exists and can be executed."""
    if runs:
        return check("login shell", OK, shell)
    detail = "%s cannot be run, so this account has no shell" % (shell or "the login shell")
    return check("login shell", WARN, detail, "chsh -s /bin/sh: deploy.py shell and exec use it")


def check_logout(configs: Sequence[str], *, user: str, lingers: bool) -> Check:
    """Whether logind ends a user's processes at logout, which would end jobs. `configs`: texts of logind.conf and of
    the files that follow it."""
    values = [v for text in configs for v in re.findall(r"^\s*KillUserProcesses\s*=\s*(\w+)", text, re.MULTILINE)]
    if not values or values[-1].lower() not in ("yes", "true", "1", "on"):
        return check("logout", OK, "jobs are not ended at logout (KillUserProcesses is off)")
    if lingers or user == "root":
        return check("logout", OK, "KillUserProcesses is on, but not for this user")
    detail = "logind ends this user's processes at logout (KillUserProcesses=yes): jobs too"
    return check("logout", WARN, detail, "loginctl enable-linger %s" % user)


def check_hidden(seen: bool) -> Check:
    """`seen`: whether another user's process is visible."""
    if seen:
        return check("other users", OK, "their processes are seen")
    detail = "their processes are hidden (hidepid): who holds a busy GPU cannot be told"
    return check("other users", WARN, detail, "mount -o remount,hidepid=0 /proc, or ask who else works here")


def check_container(found: Mapping[str, str], *, missing: Sequence[str]) -> Check:
    """`missing`: variables that name a folder that does not exist."""
    name = "container environment"
    if not found:
        return check(name, OK, "none to take over (process 1 is another user's, or has none)")
    shown = ", ".join(n if is_secret(n) else "%s=%s" % (n, value[:80]) for n, value in sorted(found.items()))
    if missing:
        hint = "set it right with --env %s=DIR" % missing[0]
        return check(name, WARN, "%s; of these %s lead nowhere" % (shown, ", ".join(missing)), hint)
    if found.get("CUDA_VISIBLE_DEVICES"):
        return check(name, WARN, shown, "jobs get GPUs of CUDA_VISIBLE_DEVICES alone, with --gpus too")
    return check(name, OK, shown)


def check_clock(ahead: float) -> Check:
    """`ahead`: seconds by which this clock is ahead of the client's, including the message's way."""
    detail = "%.1f s %s the client" % (abs(ahead), "ahead of" if ahead >= 0 else "behind")
    if abs(ahead) <= CLOCK_S:
        return check("clock", OK, detail)
    return check("clock", WARN, detail, "certificates and times in reports go by it: run chronyd or ntpd on the host")


# --- Python -----------------------------------------------------------------------------------------------------------

OLDEST_FOR_TRAINER = [3, 10]


class Python(NamedTuple):
    """An interpreter of the host, and the versions of the requested packages."""

    path: str
    version: str
    packages: Dict[str, str]


def check_python(pythons: List[Python], agent_version: str) -> Check:
    newest = max(pythons, key=lambda p: _version(p.version), default=None)
    own = "the agent runs on Python %s" % agent_version
    if newest is None:
        return check("python", WARN, own + ", and no interpreter was found for jobs", "name one with --python PATH")
    detail = "%s; the newest for jobs is %s (%s)" % (own, newest.version, newest.path)
    if _version(newest.version) >= OLDEST_FOR_TRAINER:
        return check("python", OK, detail)
    return check("python", WARN, detail + ", and the trainer needs 3.10", "install a newer one, or --python PATH")


def _version(text: str) -> List[int]:
    return [int(part) for part in re.findall(r"\d+", text)[:3]]


def check_installer(uv: Optional[str], pythons: List[Python]) -> Check:
    untried = "; whether it reaches a package index is not tried"
    if uv:
        return check("installer", OK, uv + untried)
    pip = next((p for p in pythons if "pip" in p.packages), None)
    if pip is not None:
        return check("installer", OK, "pip %s (%s)%s" % (pip.packages["pip"], pip.path, untried))
    return check("installer", WARN, "neither uv nor pip", "only needed when no interpreter here has what a job needs")


# --- network ----------------------------------------------------------------------------------------------------------

_UP, _LOOPBACK = 0x1, 0x8  # IFF_* of linux/if.h


class Network(NamedTuple):
    """Interfaces that are up, in the kernel's order, without the loopback; and the one with the default route, if there
    is one."""

    names: List[str]
    default: Optional[str]


def read_network(sys: str = "/sys/class/net", proc: str = "/proc/net") -> Network:
    """Reads the interfaces with an address. The default route is that of IPv4, else that of IPv6."""
    addressed = _addressed(proc)
    names = [name for _, name in socket.if_nameindex()] if sys == "/sys/class/net" else sorted(os.listdir(sys))
    up = [name for name in names if _is_up(os.path.join(sys, name, "flags")) and name in addressed]
    return Network(up, next((name for name in _defaults(proc) if name in up), None))


def _is_up(path: str) -> bool:
    text = read_text(path).strip()
    flags = int(text, 16) if text else 0
    return bool(flags & _UP) and not flags & _LOOPBACK


def _addressed(proc: str) -> List[str]:
    """Interfaces that have a route (each IPv4 address adds one) or an IPv6 address."""
    routes = [line.split("\t")[0].strip() for line in read_text(proc + "/route").splitlines()[1:]]
    return routes + [line.split()[-1] for line in read_text(proc + "/if_inet6").splitlines() if line.strip()]


def _defaults(proc: str) -> List[str]:
    v4 = [line.split("\t") for line in read_text(proc + "/route").splitlines()[1:]]
    v6 = [line.split() for line in read_text(proc + "/ipv6_route").splitlines()]
    found = [row[0].strip() for row in v4 if len(row) > 7 and row[1] == row[7] == "00000000"]
    return found + [row[-1] for row in v6 if len(row) > 9 and row[0] == "0" * 32 and row[1] == "00" and row[-1] != "lo"]


def nccl_choice(names: List[str]) -> Optional[str]:
    """The interface that NCCL chooses by default: InfiniBand's first, Docker's last, else in the kernel's order."""
    ranked = sorted(names, key=lambda name: (not name.startswith("ib"), name.startswith("docker")))
    return ranked[0] if ranked else None


def check_network(network: Network, env: Mapping[str, str]) -> Check:
    """`env`: a job's environment, which may name the interface."""
    name, shown = "NCCL interface", ", ".join(network.names)
    named = env.get("NCCL_SOCKET_IFNAME", "")
    if named:
        if _matches(named, network.names):
            return check(name, OK, "NCCL_SOCKET_IFNAME=%s" % named)
        hint = "--env NCCL_SOCKET_IFNAME=%s" % (network.default or "lo")
        return check(name, FAIL, "NCCL_SOCKET_IFNAME=%s is none of %s" % (named, shown or "the interfaces"), hint)
    choice = nccl_choice(network.names)
    if choice is None:
        return check(name, WARN, "only the loopback is up", "jobs on this host alone: --env NCCL_SOCKET_IFNAME=lo")
    if network.default in (None, choice) or choice.startswith("ib"):
        return check(name, OK, "%s (of %s)" % (choice, shown) if len(network.names) > 1 else choice)
    detail = "NCCL would take %s of %s, but %s leads out" % (choice, shown, network.default)
    return check(name, WARN, detail, "--env NCCL_SOCKET_IFNAME=%s" % network.default)


def _matches(named: str, names: List[str]) -> bool:
    """NCCL's own rule: a list of prefixes; "=" before it means whole names, "^" excludes."""
    known = [*names, "lo"]
    exclude, exact = named.startswith("^"), named.lstrip("^").startswith("=")
    wanted = named.lstrip("^").lstrip("=").split(",")
    hit = {n for n in known if any(n == w or (not exact and n.startswith(w)) for w in wanted)}
    return bool(set(known) - hit - {"lo"}) if exclude else bool(hit)
