"""An environment on top of another one: it sees that one's packages, and installs only into itself.

Stdlib only, Python 3.8: this package runs on the host.
"""

import os
import subprocess
from typing import Dict, List, NamedTuple

from ..host.errors import AgentError
from ..host.files import write_whole
from ..host.typed import InvalidData, parse

ASK_S = 60
BASE = "BASE"
"""A file in its folder with the path of the interpreter below it."""
_QUESTION = """
import importlib.util, json, os, site, sys
own = site.getsitepackages() + ([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])
own = [path for path in own if path in sys.path and os.path.isdir(path)]
version = ".".join(map(str, sys.version_info[:3]))
print(json.dumps({"version": version, "sites": own, "pip": importlib.util.find_spec("pip") is not None}))
"""
_PIP = "#!/bin/sh\nexec %s\n"
_NO_PIP = (
    "sh -c 'echo \"this environment has no pip, and its Python no ensurepip: install uv or pip there\" >&2; exit 1'"
)


class Below(NamedTuple):
    """An interpreter on which an environment is based, as it describes itself."""

    version: str
    sites: List[str]
    """Its folders of packages."""
    pip: bool


def ask(python: str, env: Dict[str, str]) -> Below:
    done = _run([python, "-c", _QUESTION], env)
    try:
        return parse(done.stdout.splitlines()[-1], Below)
    except (InvalidData, LookupError):
        raise AgentError("host", "%s does not tell of itself: %s" % (python, _last(done)), "name another: --python P")


def make_layer(folder: str, python: str, below: Below, env: Dict[str, str]) -> None:
    """Raises AgentError if Python cannot create the environment."""
    made = _run([python, "-m", "venv", "--without-pip", folder], env)
    if made.returncode != 0:
        hint = "name an interpreter with the module venv: --python P"
        raise AgentError("host", "no environment for the setup can be made of %s: %s" % (python, _last(made)), hint)
    own = os.path.join(folder, "bin", "python")
    major, minor = below.version.split(".")[:2]
    site = os.path.join(folder, "lib", "python%s.%s" % (major, minor), "site-packages")
    lines = ["import site; site.addsitedir(%r)" % path for path in below.sites]
    os.makedirs(site, exist_ok=True)
    write_whole(os.path.join(site, "below.pth"), ("\n".join(lines) + "\n").encode("utf-8", "surrogateescape"))
    _give_pip(folder, own, below, env)


def _give_pip(folder: str, own: str, below: Below, env: Dict[str, str]) -> None:
    """Creates a `pip` that installs here: the one on PATH would install into the environment below, which others use
    too."""
    import shlex
    import shutil

    if not below.pip and _run([own, "-I", "-m", "ensurepip", "--default-pip"], env).returncode == 0:
        return
    uv = shutil.which("uv", path=env.get("PATH", os.defpath))
    command = "%s -I -m pip" % shlex.quote(own) if below.pip else "%s pip" % shlex.quote(uv) if uv else _NO_PIP
    for name in ("pip", "pip3"):
        path = os.path.join(folder, "bin", name)
        write_whole(path, (_PIP % (command + ' "$@"')).encode("utf-8", "surrogateescape"))
        os.chmod(path, 0o700)


def in_layer(env: Dict[str, str], python: str, folder: str) -> Dict[str, str]:
    """The environment variables for processes with this interpreter, in a setup's folder."""
    search = env.get("PATH", os.defpath)
    bins = [os.path.dirname(python)]
    below = _base_of(folder)
    if below and os.path.dirname(below) not in search.split(os.pathsep):
        bins.append(os.path.dirname(below))
    found = {**env, "PATH": os.pathsep.join([*bins, search])}
    found.pop("PYTHONHOME", None)
    found.pop("VIRTUAL_ENV", None)
    prefix = os.path.dirname(bins[0])
    if os.path.exists(os.path.join(prefix, "pyvenv.cfg")):
        found["VIRTUAL_ENV"] = prefix
    return found


def _base_of(folder: str) -> str:
    try:
        with open(os.path.join(folder, BASE), encoding="utf-8", errors="surrogateescape") as f:
            return f.read().strip()
    except OSError:
        return ""


def _run(command: List[str], env: Dict[str, str]) -> "subprocess.CompletedProcess[bytes]":
    try:
        return subprocess.run(
            command,
            env=env,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            timeout=ASK_S,
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, b"", b"no answer within %d s" % ASK_S)
    except OSError as error:
        return subprocess.CompletedProcess(command, 1, b"", (error.strerror or str(error)).encode())


def _last(done: "subprocess.CompletedProcess[bytes]") -> str:
    lines = (done.stderr or done.stdout).decode("utf-8", "replace").strip().splitlines()
    return lines[-1][:200] if lines else "exit status %d, without a word" % done.returncode
