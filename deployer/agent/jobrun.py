"""One job's life: prepared, started, watched, stopped when asked, swept, and its final status written.

`Children.reap` is the only place that waits: the supervisor is the subreaper of all that it starts, and `subprocess`
would report 0 for a child that was reaped elsewhere. Stdlib only, Python 3.8, Linux.
"""

import os
import signal
import subprocess
import time
from typing import Any, Dict, List, Optional, Tuple

from . import state
from .ending import FAILED, STOPPED, Ending, RankRecord, decide_ending, exit_code, first_failure, with_outcome
from .errors import AgentError
from .layout import JOB_ID_ENV, Job, Root
from .prepare import Command, Resolving, fill, job_command, marks
from .procs import Process, command_of, end_all, is_running, job_processes, process_of
from .stopping import Stopping, child_of, kill_ranks, wrapper_of

POLL_S = 0.1
SIBLINGS_S = 5.0
"""After a trainer's first failing rank the others get so long before they are killed."""
SWEEP_S = 5.0
"""What a job left running gets so long after TERM; after a stop, what is left of the grace."""
AWAITED = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT}
"""Blocked in the supervisor and taken by `_wait` alone."""


RESERVE_BYTES = 16 << 10
"""Held on the disk for the final status: the job's own output may have filled it."""


class Children:
    """Every child of this process, adopted orphans included. Remembers how the awaited ones ended."""

    def __init__(self) -> None:
        self._codes: Dict[int, Optional[int]] = {}

    def expect(self, pid: int) -> None:
        self._codes[pid] = None

    def code(self, pid: int) -> Optional[int]:
        """None while it runs; 128 + N for signal N."""
        return self._codes[pid]

    def reap(self) -> None:
        while True:
            try:
                pid, wait_status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._codes:
                self._codes[pid] = exit_code(wait_status)


class Stopped(Exception):
    """The job was asked to stop before it had started."""


class JobRun:
    """One job's life, from preparing to its final status."""

    def __init__(self, job: Job, agent_dir: str, launch_input: Dict[str, Any]) -> None:
        self.job = job
        self.agent_dir = agent_dir
        self.input = launch_input
        self.plan: Dict[str, Any] = launch_input["plan"]
        self.adopted = bool(launch_input.get("adopt"))
        self.children = Children()
        self.status: Dict[str, Any] = (state.read_status(job) or {}) if self.adopted else {}
        self.attempt = int(self.status.get("attempt") or launch_input["attempt"])
        self.nproc = int(self.plan.get("nproc") or 1)
        self._is_trainer = self.plan.get("kind") == "trainer"
        self.main: Optional[Process] = None
        self._stop: Optional[Stopping] = None
        self._unsaved = False
        self._ranks_read: Tuple[int, List[RankRecord]] = (0, [])

    def run(self) -> None:
        """Returns when the job has ended; at once when the status cannot even be begun (`spawn` then says so)."""
        written = self.status.get("state", state.PREPARING)
        identity = state.own_identity()._asdict()
        self._save(state=written, supervisor=identity, attempt=self.attempt, nproc=self.nproc)
        if self._unsaved:
            return
        self._reserve()
        try:
            if self.adopted:
                self.main = state.main_process(self.status)
            else:
                self._launch()
            self._watch()
            self._finish(self._ending())
        except Stopped:
            self._finish(Ending(STOPPED, None, "stopped on request, before it had started"))
        except AgentError as e:
            self._finish(Ending(FAILED, state.TOOL_FAILED, e.message + ("; " + e.hint if e.hint else "")))
        except BaseException as e:
            import traceback

            _say(traceback.format_exc())
            self._finish(Ending(FAILED, state.TOOL_FAILED, "the supervisor failed: %r" % e))

    def _save(self, **changes: Any) -> None:
        """A full disk must not end the job: `_watch` and `_finish` try again."""
        self.status.update(changes)
        try:
            state.write_status(self.job, self.status)
        except OSError as e:
            if not self._unsaved:
                _say("cannot write %s: %s" % (self.job.status, e.strerror))
            self._unsaved = True
        else:
            self._unsaved = False

    def _reserve(self) -> None:
        try:
            with open(self.job.reserve, "wb") as f:
                f.write(os.urandom(RESERVE_BYTES))
        except OSError:
            pass  # then the final status waits for room

    def _release(self) -> None:
        try:
            os.unlink(self.job.reserve)
        except OSError:
            pass

    # --- start ---

    def _launch(self) -> None:
        logs = self.job.logs(self.attempt)
        for folder in (logs, self.job.ranks(self.attempt)):
            os.makedirs(folder, mode=0o700, exist_ok=True)
        root = Root(os.path.dirname(os.path.dirname(self.job.path)))
        python = self._resolve_python(root, os.path.join(logs, "prepare.log"))
        slots = {"python": python, "job": self.job.path, "agent": self.agent_dir}
        command = job_command(self.job, self.input, slots)
        self.status.update(slots=slots, argv=[fill(text, slots) for text in self.plan["argv"]], cwd=command.cwd)
        self.main = self._start(command, os.path.join(logs, "launcher.log"))
        self._save(state=state.RUNNING, started_at=state.utc(time.time()), main=self.main._asdict())

    def _resolve_python(self, root: Root, log: str) -> str:
        env = {**self.input.get("base_env", {}), **self.input.get("env", {}), **self.input.get("secrets", {})}
        resolving = Resolving(self.plan["python"], self.job, root, {**env, **marks(self.job, self.attempt)}, log)
        self.children.expect(resolving.pid)
        while self.children.code(resolving.pid) is None:
            if state.read_stop(self.job) is not None:
                raise Stopped  # the sweep ends the child and what it started
            self._wait()
        if state.read_stop(self.job) is not None:
            raise Stopped
        return resolving.result()

    def _start(self, command: Command, log: str) -> Process:
        def in_child() -> None:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, [])

        with open(log, "ab") as output:
            try:
                # only to start it: `wait` and `poll` belong to Children.reap
                started = subprocess.Popen(
                    command.argv,
                    cwd=command.cwd,
                    env=command.env,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    preexec_fn=in_child,
                )
            except OSError as e:
                raise AgentError("host", "cannot start %s in %s: %s" % (command.argv[0], command.cwd, e.strerror))
        self._popen = started  # kept: its destructor would wait
        self.children.expect(started.pid)
        return process_of(started.pid)

    # --- watch ---

    def _wait(self, timeout_s: float = POLL_S) -> None:
        """Until a child ends or the time is over; a TERM to the supervisor itself asks the job to stop."""
        self.children.reap()
        info = signal.sigtimedwait(AWAITED, timeout_s)
        if info is not None and info.si_signo != signal.SIGCHLD:
            state.request_stop(self.job)
        self.children.reap()

    def _main_ended(self) -> bool:
        if self.main is None:
            return True
        return not is_running(self.main) if self.adopted else self.children.code(self.main.pid) is not None

    def _ended(self) -> bool:
        ended = self._main_ended()
        if self.adopted and ended:  # torchrun may have gone with the supervisor while its ranks go on
            return not any(is_running(child_of(r)) or is_running(wrapper_of(r)) for r in self._ranks())
        return ended

    def _ranks(self) -> List[RankRecord]:
        """The records, read again only when their folder has changed (or just has: its time is coarse)."""
        try:
            changed_ns = os.stat(self.job.ranks(self.attempt)).st_mtime_ns
        except OSError:
            return []
        if self._ranks_read[0] != changed_ns or time.time_ns() - changed_ns < 2_000_000_000:
            self._ranks_read = (changed_ns, state.read_ranks(self.job, self.attempt))
        return self._ranks_read[1]

    def _watch(self) -> None:
        failed_at: Optional[float] = None
        while not self._ended():
            self._drive_stop()
            if self._stop is not None and self._stop.phase == "given up":
                return
            watched = self._is_trainer and self._stop is None and failed_at is None
            if watched and first_failure(self._ranks()) is not None:
                failed_at = time.monotonic()
            if failed_at is not None and time.monotonic() >= failed_at + SIBLINGS_S:
                kill_ranks(self._ranks())
            if self._unsaved:
                self._save()
            self._wait()

    def _drive_stop(self) -> None:
        request = state.read_stop(self.job)
        if request is None:
            return
        if self._stop is None:
            early = len(self._ranks()) < self.nproc
            self._stop = Stopping(self.main, self._ranks, self._leftovers, flagged=self._is_trainer, early=early)
        phase = self._stop.advance(request)
        if phase != self.status.get("phase"):
            self._save(phase=phase, grace_s=request.grace_s)

    # --- end ---

    def _ending(self) -> Ending:
        stop = state.read_stop(self.job)
        ending = decide_ending(
            self._ranks(),
            nproc=self.nproc,
            launcher_code=self.children.code(self.main.pid) if self.main and not self.adopted else None,
            launcher_log=self._launcher_log(),
            stop_requested_at=stop.requested_at if stop else None,
        )
        ending = with_outcome(ending, state.read_json(self.job.outcome))
        return ending or Ending(state.LOST, state.TOOL_FAILED, "the job's processes are gone and left no exit record")

    def _launcher_log(self) -> str:
        try:
            with open(os.path.join(self.job.logs(self.attempt), "launcher.log"), "rb") as f:
                f.seek(max(0, f.seek(0, os.SEEK_END) - (1 << 16)))
                return f.read().decode("utf-8", "replace")
        except OSError:
            return ""

    def _finish(self, ending: Ending) -> None:
        """Ends what the job left running, then writes the last word."""
        term_s = self._stop.left_s() if self._stop is not None else SWEEP_S
        swept, remaining = end_all(self._leftovers, term_s=term_s, idle=self.children.reap)
        final = {
            **ending._asdict(),
            "ended_at": state.utc(time.time()),
            "swept": swept,
            "remaining": [{"pid": p.pid, "cmdline": command_of(p.pid)} for p in remaining],
            "phase": None,
        }
        if ending.state == STOPPED:
            final["gpus_free"] = _gpus_free(self.plan, self.input.get("base_env") or dict(os.environ))
        self._release()
        self._save(**final)
        for _ in range(60):
            if self._unsaved:
                time.sleep(1)
                self._save()

    def _leftovers(self) -> List[Process]:
        return job_processes("%s=%s" % (JOB_ID_ENV, self.job.id), supervisor=os.getpid())


def _say(text: str) -> None:
    """Into the supervisor's log; a full disk must not end the supervisor."""
    try:
        os.write(2, (text + "\n").encode("utf-8", "replace"))
    except OSError:
        pass


def _gpus_free(plan: Dict[str, Any], env: Dict[str, str]) -> Optional[bool]:
    """Whether nobody holds the job's GPUs any more; None when the job has none or nobody can tell."""
    if plan.get("device") != "cuda":
        return None
    from . import gpus

    deadline = time.monotonic() + SWEEP_S
    while True:  # the driver frees a dead process's memory a little later
        try:
            wanted = {gpu.uuid for gpu in gpus.check_gpus(plan["gpus"], env, True)}
            free = not any(h.gpu_uuid in wanted for h in gpus.holders(env))
        except Exception:  # whatever nvidia-smi does, the job's verdict must be written
            return None
        if free or time.monotonic() >= deadline:
            return free
        time.sleep(0.2)
