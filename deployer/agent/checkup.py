"""The doctor's checks: what of this host would make a job fail, and what to do about it.

Stdlib only, Python 3.8: this package runs on the host.
"""

import glob
import os
import re
import resource
import shutil
import sys
import time
from typing import Any, Dict, Iterator, List, Optional

from . import gpus, runtime
from .errors import AgentError
from .layout import Root
from .probe import container_env, existing_folder, host_facts, is_secret, job_environment, user_name
from .wire import Call

OK, WARN, FAIL = "ok", "warn", "fail"
LOW_DISK_BYTES = 10 * 10**9
LOW_SHM_BYTES = 10**9
LOW_FILES = 4096
CLOCK_S = 10
_GB = 1e9
_CUDA_RUNTIMES = ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu13", "nvidia-cuda-runtime-cu12")
_PACKAGES = ("torch", "pip", *_CUDA_RUNTIMES)  # asked together, so that each interpreter starts once

Check = Dict[str, str]


def check(name: str, status: str, detail: str, hint: str = "") -> Check:
    return {"name": name, "status": status, "detail": detail, "hint": hint}


def run_checks(root: Root, env: Dict[str, str], *, client_time: Optional[float]) -> List[Check]:
    """All checks, in the order in which a launch would meet them."""
    clock = [check_clock(time.time() - client_time)] if client_time is not None else []
    checks = [
        check("python", OK, "the agent runs on Python %s (%s)" % (sys.version.split()[0], sys.executable)),
        check_root(root),
        *check_gpus(env),
        check_torch(env, root),
        check_installer(env, root),
        check_shm(),
        check_open_files(),
        check_logout(),
        check_processes(),
        check_container(),
        check_hub(env),
    ]
    return checks + clock


def doctor(root: Root, call: Call) -> Dict[str, Any]:
    """Facts about this host and checks of it, each with what to do."""
    env = job_environment(dict(os.environ), container_env())
    checks = run_checks(root, env, client_time=call.head.get("client_time"))
    call.send_event("doctor", {"facts": host_facts(root), "checks": checks})
    return {}


def check_root(root: Root) -> Check:
    probe = os.path.join(root.tmp, "doctor-%d" % os.getpid())
    hint = "choose another folder with --remote-root DIR"
    try:
        os.makedirs(root.tmp, mode=0o700, exist_ok=True)
        with open(probe, "w") as f:
            f.write("x")
        os.unlink(probe)
    except OSError as error:
        return check("root", FAIL, "%s cannot be written: %s" % (root.path, error.strerror), hint)
    status = os.statvfs(root.path)
    free = status.f_bavail * status.f_frsize
    kind = filesystem_of(root.path)
    detail = "%s (%s), %.0f GB free" % (root.path, kind or "unknown file system", free / _GB)
    if status.f_files and status.f_favail < 20000:
        return check("root", WARN, "%s, only %d inodes free" % (detail, status.f_favail), hint)
    if free < LOW_DISK_BYTES:
        return check("root", WARN, detail + ": little for checkpoints", hint)
    return check("root", OK, detail)


def filesystem_of(path: str) -> str:
    """The type of the file system that holds a path, as in /proc/mounts."""
    path, best = os.path.realpath(existing_folder(path)), ("", "")
    try:
        with open("/proc/mounts", encoding="utf-8", errors="replace") as f:
            mounts = [line.split() for line in f]
    except OSError:
        return ""
    for _, where, kind, *_ in mounts:
        if (path + "/").startswith(where.rstrip("/") + "/") and len(where) >= len(best[0]):
            best = (where, kind)
    return best[1]


def check_gpus(env: Dict[str, str]) -> Iterator[Check]:
    try:
        found, using, driver = gpus.list_gpus(env), gpus.holders(env), gpus.query_driver(env)
    except AgentError as error:
        yield check("gpus", FAIL, error.message, error.hint)
        return
    if not found:
        yield check("gpus", WARN, "none seen (no nvidia-smi, or it lists none)", "jobs here need target.device=cpu")
        return
    yield check("driver", OK, "NVIDIA %s" % driver)
    for gpu in found:
        users = gpus.users_of(gpu, using)
        memory = "%s, %d of %d MiB in use" % (gpu.name, gpu.memory_used_mib, gpu.memory_total_mib)
        detail = memory + (": " + users if users else "")
        yield check(
            "gpu %d" % gpu.index, WARN if users else OK, detail, "--allow-busy runs beside them" if users else ""
        )


def check_torch(env: Dict[str, str], root: Root) -> Check:
    found = runtime.list_installed(_PACKAGES, env=env, root=root)
    having = [(path, versions) for path, versions in found if "torch" in versions]
    if not having:
        return check(
            "torch", WARN, "no interpreter here has it", "jobs build an environment first, which takes minutes"
        )
    return check("torch", OK, "; ".join("%s (%s)" % (_torch(versions), path) for path, versions in having))


def _torch(versions: Dict[str, str]) -> str:
    """torch's version and that of the CUDA runtime that came with it, when it came as packages."""
    cuda = [versions[name] for name in _CUDA_RUNTIMES if name in versions]
    return versions["torch"] + (" with CUDA %s" % cuda[0] if cuda else "")


def check_installer(env: Dict[str, str], root: Root) -> Check:
    uv = shutil.which("uv", path=env.get("PATH", os.defpath))
    if uv:
        return check("installer", OK, uv)
    found = runtime.list_installed(_PACKAGES, env=env, root=root)
    having = [(versions["pip"], path) for path, versions in found if "pip" in versions]
    if having:
        return check("installer", OK, "pip %s (%s)" % having[0])
    return check("installer", WARN, "neither uv nor pip", "only needed when no interpreter here has what a job needs")


def check_shm() -> Check:
    try:
        status = os.statvfs("/dev/shm")
    except OSError:
        return check("/dev/shm", WARN, "not there", "NCCL needs it")
    size = status.f_blocks * status.f_frsize
    detail = "%.1f GB" % (size / _GB)
    hint = "NCCL needs it: docker run --shm-size=8g"
    return check("/dev/shm", OK, detail) if size >= LOW_SHM_BYTES else check("/dev/shm", WARN, detail, hint)


def check_open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= LOW_FILES:
        return check("open files", OK, "limit %d" % soft)
    return check("open files", WARN, "limit %d (at most %d)" % (soft, hard), "raise it: ulimit -n, or limits.conf")


def check_logout() -> Check:
    """Whether logind ends a user's processes at logout, which would end jobs."""
    configs = ["/etc/systemd/logind.conf", *sorted(glob.glob("/etc/systemd/logind.conf.d/*.conf"))]
    kills = "no"
    for path in configs:
        try:
            with open(path, encoding="utf-8", errors="replace") as f:
                values = re.findall(r"^\s*KillUserProcesses\s*=\s*(\w+)", f.read(), re.MULTILINE)
        except OSError:
            continue
        kills = values[-1] if values else kills
    if kills.lower() not in ("yes", "true", "1", "on"):
        return check("logout", OK, "jobs are not ended at logout (KillUserProcesses is off)")
    lingers = os.path.exists("/var/lib/systemd/linger/" + user_name())
    if lingers or user_name() == "root":
        return check("logout", OK, "KillUserProcesses is on, but not for this user")
    hint = "loginctl enable-linger %s" % user_name()
    return check("logout", WARN, "logind ends this user's processes at logout (KillUserProcesses=yes): jobs too", hint)


def check_processes() -> Check:
    if os.path.exists("/proc/1"):
        return check("processes", OK, "other users' processes are seen")
    detail = "other users' processes are hidden (hidepid): who holds a busy GPU cannot be told"
    return check("processes", WARN, detail, "")


def check_container() -> Check:
    found = container_env()
    if not found:
        return check("container environment", OK, "none to take over (process 1 is another user's, or has none)")
    shown = [name if is_secret(name) else "%s=%s" % (name, value[:80]) for name, value in sorted(found.items())]
    return check("container environment", OK, ", ".join(shown))


def check_hub(env: Dict[str, str]) -> Check:
    home = env.get("HF_HOME") or os.path.join(
        env.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "huggingface"
    )
    hub = env.get("HF_HUB_CACHE") or os.path.join(home, "hub")
    models = len(glob.glob(os.path.join(glob.escape(hub), "models--*")))
    status = os.statvfs(existing_folder(hub))
    free = status.f_bavail * status.f_frsize
    detail = "%s: %d models, %.0f GB free" % (hub, models, free / _GB)
    if free < LOW_DISK_BYTES:
        return check("Hugging Face cache", WARN, detail, "put it elsewhere with --env HF_HOME=DIR")
    return check("Hugging Face cache", OK, detail)


def check_clock(ahead: float) -> Check:
    """`ahead`: seconds by which this clock leads the client's, the way of the message included."""
    detail = "%.1f s %s the client" % (abs(ahead), "ahead of" if ahead >= 0 else "behind")
    if abs(ahead) <= CLOCK_S:
        return check("clock", OK, detail)
    return check("clock", WARN, detail, "certificates and times in reports go by it: run chronyd or ntpd on the host")
