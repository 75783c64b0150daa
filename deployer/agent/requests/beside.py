"""The environment for a command or a shell in a job's environment: that of the job's own processes.

Stdlib only, Python 3.8: this package runs on the host.
"""

import errno
import os
import re
import secrets
import shlex
import time
from typing import Dict, List, Mapping, NamedTuple, Tuple

from ..host import environment
from ..host.errors import AgentError
from ..host.layout import AGENT_DIR, BESIDE_ENV, STARTED_ENV, Job, Root
from ..host.typed import InvalidData
from ..job.plan import Plan, Text, groups_of, main_role
from ..job.record import Record, plan_of, read_record
from ..job.status import read_status
from ..supervisor.command import fill, job_env, marks
from ..supervisor.start import LaunchInput
from ..wire.conversation import Call
from .jobs import find_folder

OPENED_S = 60.0
"""Seconds to wait for a shell to read its environment."""

_PYTHON = re.compile(r"python(3(\.\d+)?)?\Z")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


class Beside(NamedTuple):
    """The environment, and the job's interpreter; empty if none was found yet."""

    env: Dict[str, str]
    python: str = ""

    def argv(self, words: List[str]) -> List[str]:
        """The arguments with the job's interpreter for `python`, as in a launch."""
        return [self.python, *words[1:]] if self.python and _PYTHON.match(words[0]) else words


def beside(root: Root, job: Job, given: Mapping[str, str]) -> Beside:
    """The environment for a command in this job's environment. `given`: the values of its secrets that the client has.
    If the job's records are damaged, it gets the session's environment and the job's folder."""
    base = environment.job_environment(dict(os.environ), environment.container_env())
    status = read_status(job)
    attempt = max(1, status.attempt) if status is not None else 1
    try:
        record = read_record(job)
        plan = plan_of(job, record)
    except InvalidData:
        return Beside({**base, **marks(job, attempt), BESIDE_ENV: job.path})
    group = next(groups_of(plan))
    filled = next((g.slots for g in status.groups if g.folder == group.folder), {}) if status is not None else {}
    slots = {"root": root.path, "job": job.path, "agent": AGENT_DIR, **filled}
    env = _env(job, plan, record, given, slots, base, attempt)
    python = slots.get("python", "")
    return Beside({**env, **_found_first(python, env), BESIDE_ENV: job.path}, python)


def _env(
    job: Job,
    plan: Plan,
    record: Record,
    given: Mapping[str, str],
    slots: Mapping[str, str],
    base: Dict[str, str],
    attempt: int,
) -> Dict[str, str]:
    role = main_role(plan)
    known: Dict[str, Text] = {}
    for name, text in role.env.items():
        try:
            known[name] = fill(text, slots)
        except AgentError:  # what only a start decides: a job that waits has no GPU yet
            known[name] = ""
    secrets_of = {name: value for name, value in given.items() if name in plan.secret_names}
    launched = LaunchInput(plan, attempt, env=record.env, secrets=secrets_of, base_env=base)
    env = job_env(job, role._replace(env=known), launched, slots, attempt=attempt, restarted=False)
    env.pop(STARTED_ENV, None)
    return env


def _found_first(python: str, env: Mapping[str, str]) -> Dict[str, str]:
    """The variables with which a shell finds the job's interpreter and its packages, as if the environment were
    activated."""
    if not python:
        return {}
    folder = os.path.dirname(python)
    path = [folder, *(part for part in env.get("PATH", os.defpath).split(os.pathsep) if part and part != folder)]
    prefix = os.path.dirname(folder)
    if os.path.exists(os.path.join(prefix, "pyvenv.cfg")):
        return {"PATH": os.pathsep.join(path), "VIRTUAL_ENV": prefix}
    return {"PATH": os.pathsep.join(path)}


# --- for a shell ------------------------------------------------------------------------------------------------------


class _Entering(NamedTuple):
    job: str
    secrets: Dict[str, str] = {}


def enter(root: Root, call: Call) -> None:
    """Passes the environment to a shell that the client starts over another connection: through a pipe in the file
    system that no other account can open, because it may contain secrets. Sends the pipe's path, and ends once it was
    read."""
    asked = call.read(_Entering)
    job = find_folder(root, asked.job)
    script = _script(beside(root, job, asked.secrets).env, job.code)
    os.makedirs(root.tmp, mode=0o700, exist_ok=True)
    path = os.path.join(root.tmp, "enter-" + secrets.token_hex(8))
    os.mkfifo(path, 0o600)
    try:
        call.send_event("enter", path)
        _write_once(path, script, call)
    finally:
        os.unlink(path)


def _script(env: Mapping[str, str], code: str) -> bytes:
    """A script for /bin/sh that sets the variables that differ from this session's, which the shell has too."""
    lines = ["cd %s || exit 1" % shlex.quote(code)]
    new: List[Tuple[str, str]] = sorted(set(env.items()) - set(os.environ.items()))
    lines += ["export %s=%s" % (name, shlex.quote(value)) for name, value in new if _NAME.match(name)]
    return os.fsencode("\n".join([*lines, ""]))


def _write_once(path: str, data: bytes, call: Call) -> None:
    deadline = time.monotonic() + OPENED_S
    while time.monotonic() < deadline and not call.cancelled.is_set():
        try:
            fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno != errno.ENXIO:  # nobody reads yet
                raise
            time.sleep(0.02)
            continue
        os.set_blocking(fd, True)
        with open(fd, "wb") as pipe:
            pipe.write(data)
        return
    raise AgentError("host", "no shell has asked for its environment within %g s" % OPENED_S)
