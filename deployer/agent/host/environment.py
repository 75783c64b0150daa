"""The environment that jobs get on this host.

Stdlib only, Python 3.8: this package runs on the host.
"""

import os
from typing import Dict, Mapping

_NAMES = ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
_PREFIXES = ("CUDA_", "HF_", "NCCL_", "NVIDIA_", "CONDA_", "UV_")
_LISTS = ("PATH", "LD_LIBRARY_PATH")
_SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL")


def container_env() -> Dict[str, str]:
    """The variables that matter to a job, of those with which the host's container was started: sshd's sessions do not
    inherit them.

    Empty if process 1 belongs to another user.
    """
    try:
        with open("/proc/1/environ", "rb") as f:
            return parse_container_env(f.read())
    except OSError:
        return {}


def parse_container_env(data: bytes) -> Dict[str, str]:
    """The variables that matter to a job, from a `/proc/PID/environ`."""
    pairs = [os.fsdecode(item).partition("=") for item in data.split(b"\0") if b"=" in item]
    return {name: value for name, _, value in pairs if name in _NAMES or name.startswith(_PREFIXES)}


def job_environment(session_env: Mapping[str, str], container: Mapping[str, str]) -> Dict[str, str]:
    """The container's environment, overridden by the session's. In lists of folders the session's entries come
    first."""
    merged = {**container, **session_env}
    for name in _LISTS:
        parts = [p for env in (session_env, container) for p in env.get(name, "").split(os.pathsep) if p]
        if parts:
            merged[name] = os.pathsep.join(dict.fromkeys(parts))
    return merged


def is_secret(name: str) -> bool:
    """Whether a variable's value must not be shown."""
    return any(word in name.upper() for word in _SECRET)


def hub_folder(env: Mapping[str, str]) -> str:
    """The folder of Hugging Face's model cache."""
    caches = env.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    home = env.get("HF_HOME") or os.path.join(caches, "huggingface")
    return env.get("HF_HUB_CACHE") or os.path.join(home, "hub")
