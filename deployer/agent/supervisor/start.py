"""The supervisor's process: one per job, in its own session, independent of other processes; `life` is its work.

Stdlib only, Python 3.8, Linux.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Dict, NamedTuple, Optional, Tuple

from ..gpus.view import InheritedClaim
from ..host.errors import AgentError
from ..host.layout import SUPERVISOR_ENV, Job
from ..host.locks import take_lock
from ..host.processes import own_process_argv
from ..host.typed import parse, to_json
from ..job.plan import Plan, unreadable_plan
from ..job.record import known_plan
from ..job.status import read_status

START_S = 30.0
"""Seconds in which a new supervisor must write its identity."""

_PR_SET_CHILD_SUBREAPER = 36


class LaunchInput(NamedTuple):
    """A supervisor's input, sent only through a pipe, because it contains secrets."""

    plan: Plan
    attempt: int
    env: Dict[str, str] = {}
    secrets: Dict[str, str] = {}
    base_env: Dict[str, str] = {}
    """The session's environment."""
    wheels: Optional[str] = None
    """The folder of wheels that were sent."""
    held: Optional[InheritedClaim] = None
    """The job's GPUs, or a place in their queue."""
    after: Tuple[str, ...] = ()
    """IDs of the jobs that must succeed first; the job has no GPUs before."""
    notify: Tuple[str, ...] = ()
    """The --notify URLs."""
    adopt: bool = False
    """The job already runs, and its supervisor was killed."""


MAX_INPUT = 64 << 20


# --- the agent's side -------------------------------------------------------------------------------------------------


class Starting:
    """A supervisor's process that loads its modules while the job's folder is still being created. `go` gives it the
    job.

    As a context manager: if it got no job by the end, it ends without output.
    """

    def __init__(self, job: Job, *, held_fd: int = -1) -> None:
        """`held_fd`: the descriptor that holds the job's GPUs."""
        self._job = job
        os.makedirs(job.control, mode=0o700, exist_ok=True)
        options = ["-B"] if sys.dont_write_bytecode else []
        with open(os.open(job.supervisor_log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab") as log:
            self._process = subprocess.Popen(
                own_process_argv(__name__, job.path, options=options),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd="/",
                env={**os.environ, SUPERVISOR_ENV: job.path},
                start_new_session=True,
                close_fds=True,
                pass_fds=[held_fd] if held_fd >= 0 else [],
            )
        threading.Thread(target=self._process.wait, daemon=True).start()  # no zombie while this agent lives
        assert self._process.stdin is not None
        self._pipe = self._process.stdin

    def go(self, launch_input: LaunchInput) -> None:
        """Sends the supervisor its input and waits until status.json names the supervisor. Raises AgentError if it does
        not start; its messages are in control/supervisor.log."""
        try:
            with self._pipe:
                self._pipe.write(json.dumps(to_json(launch_input)).encode("ascii"))
        except BrokenPipeError:
            pass  # it has ended; the wait below says so
        _await_identity(self._job, self._process)

    def __enter__(self) -> "Starting":
        return self

    def __exit__(self, *exc: object) -> None:
        self._pipe.close()


def spawn(job: Job, launch_input: LaunchInput) -> None:
    """Starts the job's supervisor at once; see Starting.go."""
    held = launch_input.held
    Starting(job, held_fd=-1 if held is None or held.fd is None else held.fd).go(launch_input)


def adopt(job: Job, *, attempt: int = 1) -> None:
    """Gives a job whose supervisor was killed a new one, which watches its running processes and can stop them.
    `attempt`: from the marks of these processes, if the job's status has none."""
    spawn(job, LaunchInput(known_plan(job) or unreadable_plan(job.id), attempt, adopt=True))


def _await_identity(job: Job, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + START_S
    wait_s = 0.002
    while time.monotonic() < deadline:
        status = read_status(job)
        if status is not None and status.supervisor is not None and status.supervisor.pid == process.pid:
            return
        if process.returncode is not None:
            raise AgentError("host", "the job's supervisor did not start: %s" % _last_words(job))
        time.sleep(wait_s)
        wait_s = min(0.05, wait_s * 1.5)
    what = "the job's supervisor did not start within %g s: %s" % (START_S, _last_words(job))
    raise AgentError("host", what, "the host may be overloaded, or its disk may hang: deploy.py doctor")


def _last_words(job: Job) -> str:
    with open(job.supervisor_log, "rb") as f:
        lines = f.read()[-4096:].decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"


# --- the supervisor's side --------------------------------------------------------------------------------------------


def main(job_dir: str) -> None:
    """The main function of the supervisor's process: reads the launch input from stdin, and ends when the job has
    ended."""
    import ctypes  # the agent itself needs neither these nor the next ones

    from .children import AWAITED

    job = Job(job_dir)
    os.umask(0o077)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    from ..python import find  # noqa: F401  # loaded before the job is known, not afterwards
    from .life import JobRun

    sys.dont_write_bytecode = True  # what is loaded later may meet a disk that the job has filled; see serve.py
    given = sys.stdin.buffer.read()
    if not given:
        return  # the launch came to nothing
    launch_input = parse(given, LaunchInput, most=MAX_INPUT)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    lock = _only_supervisor(job)
    if not launch_input.adopt and has_begun(job, launch_input.attempt):
        sys.exit("attempt %d has been begun by another supervisor" % launch_input.attempt)
    JobRun(job, launch_input).run()
    os.close(lock)


def has_begun(job: Job, attempt: int) -> bool:
    """Whether a supervisor has owned this attempt, according to the status or, if that was removed, the logs. Needed
    because a supervisor that was halted before it began can continue after another one has run the job."""
    if os.path.isdir(job.logs(attempt)) or (attempt == 1 and os.path.exists(job.status)):
        return True
    status = read_status(job)
    return status is not None and status.attempt >= attempt


def _only_supervisor(job: Job) -> int:
    """Holds the supervisor's lock while this process lives. Ends the process if another supervisor holds it."""
    lock = os.open(os.path.join(job.control, "supervisor.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        alone = take_lock(lock)
    except OSError:
        alone = True  # a file system without locks
    if not alone:
        sys.exit("the job has a supervisor already")
    return lock
