"""Makes the commands of a plan: fills the slots once, composes the environment, finds the interpreter.

Stdlib only, Python 3.8: this package runs on the host.
"""

import ctypes
import json
import os
import signal
import sys
import time
from typing import Dict, List, Mapping, NamedTuple, NoReturn, Optional, Sequence, Tuple

from ..host.errors import AgentError, SetupFailed
from ..host.layout import (
    ATTEMPT_ENV,
    BESIDE_ENV,
    GROUP_ENV,
    JOB_ID_ENV,
    RESTARTED_ENV,
    RUN_DIR_ENV,
    STARTED_ENV,
    Job,
    Root,
)
from ..host.processes import start_copy
from ..host.typed import parse, to_json
from ..job import plan
from ..job.plan import TRAINER, Role, Setup, Text
from ..python.spec import PythonSpec
from .start import LaunchInput

_PR_SET_PDEATHSIG = 1
_OF_TORCHRUN = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
)
_OF_A_NODE = ("NODE_RANK", "NNODES", "NUM_NODES")  # which the trainer reads where a user starts it by hand
_OF_A_JOB = (RESTARTED_ENV, GROUP_ENV, BESIDE_ENV)


class Command(NamedTuple):
    """The command of a group of processes; `argv` has the rank wrapper before the program if needed."""

    argv: List[str]
    cwd: str
    env: Dict[str, str]


def fill(text: Text, slots: Mapping[str, str]) -> str:
    """The text with its slots' values. Raises AgentError for a slot that this agent does not know."""
    try:
        return plan.fill(text, slots)
    except KeyError as error:
        raise AgentError("usage", "the plan has an unknown slot: %s" % error.args, "client and agent differ") from None


def job_env(
    job: Job,
    role: Role,
    given: LaunchInput,
    slots: Mapping[str, str],
    *,
    attempt: int,
    restarted: bool,
    folder: str = "",
) -> Dict[str, str]:
    """A role's environment: the session's, then the plan's, the user's, the secrets, and finally our own marks.
    `folder`: that of its group of processes.

    Variables of an outer torchrun or job in the session are dropped, and those of a cloud that count its nodes:
    otherwise the job would use them (torchrun reads PET_*).
    """
    base = {k: v for k, v in given.base_env.items() if not (_is_torchruns(k) or k in _OF_A_JOB)}
    own = {name: fill(text, slots) for name, text in role.env.items()}
    env = {"PYTHONUNBUFFERED": "1", **base, **own, **given.env, **given.secrets}
    if given.plan.python.paths:
        paths = [os.path.join(job.code, path) if path != "." else job.code for path in given.plan.python.paths]
        env["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [env.get("PYTHONPATH")])])
    if restarted:
        env[RESTARTED_ENV] = "1"
    if role.name == TRAINER:  # whose start is told from here
        env[STARTED_ENV] = "%.2f" % time.clock_gettime(time.CLOCK_BOOTTIME)
    if folder:
        env[GROUP_ENV] = folder
    if "setup" in slots:
        from ..python.setup import environment_of  # a job without starts sooner

        env = environment_of(env, slots["python"], slots["setup"])
    return {**env, **marks(job, attempt)}


def marks(job: Job, attempt: int) -> Dict[str, str]:
    return {JOB_ID_ENV: job.id, RUN_DIR_ENV: job.path, ATTEMPT_ENV: str(attempt)}


def _is_torchruns(name: str) -> bool:
    return name in _OF_TORCHRUN or name in _OF_A_NODE or name.startswith(("TORCHELASTIC_", "PET_"))


def job_command(role: Role, argv: Sequence[str], env: Dict[str, str], slots: Mapping[str, str]) -> Command:
    """The command for a role's filled `argv`. A program without torchrun is rank 0 and gets the same wrapper as
    torchrun's ranks."""
    if not role.torchrun:
        argv = [sys.executable, "-I", "-S", os.path.join(slots["agent"], "rank.py"), "--exec", *argv]
    return Command(list(argv), fill(role.cwd, slots), env)


class _Answer(NamedTuple):
    """The child's answer: the interpreter, or else an AgentError's kind, message and hint."""

    python: str = ""
    error: Tuple[str, ...] = ()
    setup: Dict[str, str] = {}
    """Slots that the job's setup fills: its folder, and the interpreter below the job's."""
    code: Optional[int] = None
    """The exit code of a failed setup."""


class SetupInput(NamedTuple):
    """The input of a job's setup."""

    plan: Setup
    env: Dict[str, str]
    hidden: Sequence[str]
    """Values that must not show in a log."""


class Resolving:
    """Finds the job's interpreter in a child process, so that a stop can end it whatever it is installing."""

    def __init__(
        self,
        spec: PythonSpec,
        job: Job,
        root: Root,
        env: Dict[str, str],
        log: str,
        setup: "Optional[SetupInput]" = None,
    ) -> None:
        """`log`: gets all output of the preparation. The child leads its own process group."""
        self._log = log
        self._answer, writing = os.pipe()

        def resolve() -> NoReturn:
            os.setpgid(0, 0)
            # the child holds the supervisor's lock and no other process would read its answer, so it ends with the
            # supervisor
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
            _resolve(spec, job, root, env, log, writing, setup)

        self.pid = start_copy(resolve)
        os.close(writing)

    def result(self) -> Dict[str, str]:
        """The slots that it fills, `python` and those of a setup, once the child has ended. Raises AgentError with the
        reason if there is no interpreter."""
        with open(self._answer, "rb") as f:
            data = f.read()
        if not data:
            raise AgentError("host", "the preparation of the Python environment was killed", _see(self._log))
        answer = parse(data, _Answer)
        if answer.code is not None:
            raise SetupFailed(answer.code, *answer.error[1:])
        if answer.error:
            raise AgentError(*answer.error)
        return {"python": answer.python, **answer.setup}


def _see(log: str) -> str:
    """The hint `see prepare.log`; empty if the log is empty."""
    try:
        return "see prepare.log" if os.path.getsize(log) else ""
    except OSError:
        return ""


def _resolve(
    spec: PythonSpec,
    job: Job,
    root: Root,
    env: Dict[str, str],
    log: str,
    answer: int,
    setup: "Optional[SetupInput]",
) -> NoReturn:
    code = 1
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.dup2(output, 1)
        os.dup2(output, 2)
        from ..python.find import resolve_python

        with open(output, "ab", buffering=0) as f:
            found = _Answer(resolve_python(spec, job.code, root, env, f))
            if setup is not None:
                from ..python.setup import SetupRequest, set_up

                request = SetupRequest(*setup.plan, setup.env, setup.hidden, explicit=bool(spec.explicit))
                python, folder = set_up(request, found.python, job.code, root, f)
                found = _Answer(python, setup={"setup": folder, "below": found.python})
    except SetupFailed as e:
        found = _Answer(error=(e.kind, e.message[:4000], e.hint[:500]), code=e.code)
    except AgentError as e:
        found = _Answer(error=(e.kind, e.message[:4000], e.hint[:500]))  # a pipe holds it until somebody reads
    except BaseException as e:
        import traceback

        traceback.print_exc()
        found = _Answer(error=("host", "the Python environment could not be prepared: %r" % e, _see(log)))
    try:
        os.write(answer, json.dumps(to_json(found)).encode("ascii"))
        code = 0
    finally:
        os._exit(code)
